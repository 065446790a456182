"""Fixtures that run an op on every instruction set and thread count, and put things back."""

import pytest
import torch

from pyengine import _native


def available() -> list[str]:
    """The instruction sets of this build and machine; ["reference"] without the core."""
    core = _native.core()
    if core is None:
        return ["reference"]
    names = [name for name in ("generic", "avx2", "avx512") if core.set_isa(name)]
    core.set_isa("auto")
    return names


@pytest.fixture(params=available())
def isa(request):
    core = _native.core()
    if core is not None:
        core.set_isa(request.param)
    yield request.param
    if core is not None:
        core.set_isa("auto")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one():
    return torch.tensor(1.0)


@pytest.fixture
def scale():
    return torch.tensor(0.3)
