"""Fixtures that run an op on every instruction set, thread count and device, and put things back."""

import pytest
import torch
from cuda_cases import Device
from emulated_cuda import load_kernels

from pyengine import _native
from pyengine._ops import BucketPlan


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


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The CUDA kernels, built for the emulator."""
    return load_kernels(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    core = _native.core()
    if core is None or not core.has_cuda:
        pytest.skip("the core was built without CUDA")
    device = Device("cuda", BucketPlan)
    yield device
    device.check_margins()


@pytest.fixture
def emulated(kernels):
    device = Device.emulated(kernels)
    yield device
    device.check_margins()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.getfixturevalue("gpu" if request.param == "cuda" else "emulated")
