"""Fixtures that run an op on every instruction set, number of threads and device, and restore the setting."""

import fcntl
import os

import forced_isa
import pytest
import torch
from cuda_cases import Device
from emulated_cuda import FORWARD, REVERSED, SHUFFLED, load_kernels

from pyengine.ops import native
from pyengine.ops.plan import BucketPlan


def levels() -> list[str]:
    """Return every instruction set of this build and machine, or only the forced one; without the core,
    ["reference"].
    """
    core = native.core()
    if core is None:
        return ["reference"]
    return [core.isa()] if forced_isa.wanted() else forced_isa.available(core)


@pytest.fixture(params=levels())
def isa(request):
    core = native.core()
    if core is None:
        return (yield request.param)
    before = core.isa()
    core.set_isa(request.param)
    yield request.param
    core.set_isa(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one():
    return torch.tensor(1.0)


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items):
    """Mark tests on the emulator as slow: compiling the kernels for it takes two cores one minute."""
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if "kernels" in item.fixturenames or any(
            param == "emulated" for param in params if isinstance(param, str)
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def scale():
    return torch.tensor(0.3)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """Return the CUDA kernels, which are built for the emulator once for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "emulated"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return load_kernels(folder)


@pytest.fixture(params=[REVERSED, SHUFFLED])
def disordered(kernels, request):
    """Return the emulated kernels with a different order of blocks, and of threads between two barriers."""
    kernels.set_order(request.param)
    yield kernels
    kernels.set_order(FORWARD)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    core = native.core()
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


@pytest.fixture(params=[*levels(), "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def anywhere(request):
    """Return the device of the CPU ops on one instruction set, of the emulated kernels, or of a GPU."""
    if request.param in ("emulated", "cuda"):
        return (yield request.getfixturevalue("gpu" if request.param == "cuda" else "emulated"))
    core = native.core()
    before = core and core.isa()
    if core is not None:
        core.set_isa(request.param)
    device = Device("cpu", BucketPlan)
    yield device
    device.check_margins()
    if core is not None:
        core.set_isa(before)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.getfixturevalue("gpu" if request.param == "cuda" else "emulated")
