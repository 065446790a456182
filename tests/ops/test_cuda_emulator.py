"""The emulator detects the faults that the tests of the CUDA kernels rely on it to detect."""

import ctypes
import re

import pytest
import torch
from emulated_cuda import EMULATOR, FORWARD, ORDERS, REVERSED, SHUFFLED, build

pytestmark = pytest.mark.slow  # the emulator is compiled first


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    return ctypes.CDLL(str(build(folder / "toys.so", [EMULATOR / "toys.cu"])))


@pytest.fixture(params=ORDERS)
def toys(library, request):
    library.emulator_set_order(request.param)
    return library


def run(toys, name, *more):
    """Return (status, message, the 100 numbers that the kernel wrote)."""
    message, seen = ctypes.create_string_buffer(1000), torch.zeros(100, dtype=torch.float64)
    status = getattr(toys, f"toy_{name}")(message, ctypes.c_void_p(seen.data_ptr()), *more)
    return status, message.value.decode(), seen


def test_a_missing_barrier_shows_as_poison(toys):
    assert run(toys, "race")[2][:64].isnan().any()


def test_shared_memory_is_poisoned_before_every_block(toys):
    assert run(toys, "unwritten")[2][:64].isnan().all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("early_exit", r"0..31 at .*toys.cu:\d+; 32..63 have ended"),
        ("two_barriers", r"0..39 at .*toys.cu:\d+; 40..63 at .*toys.cu:\d+"),
        ("half_a_warp", r"0..15 at .*toys.cu:\d+; 16..\d+ have ended"),
        ("misaligned", r"thread \d+ of block 0 accesses 16 bytes at address \d+"),
        ("nowhere", "thread 5 of block 0 touches address 8, which is not there"),
        ("unloaded", "a kernel is launched that was not loaded before"),
    ],
)
def test_a_fault_is_named_and_the_next_kernel_runs(library, name, words):
    status, message, _ = run(library, name)
    assert status == -1
    assert re.search(words, message), message
    assert run(library, "any", 0)[0] == 0


def test_blocks_run_in_the_order_that_was_asked_for(library):
    seen = []
    for order in ORDERS:
        library.emulator_set_order(order)
        seen.append(run(library, "order")[2][1:6].tolist())
    assert seen[FORWARD] == [0, 1, 2, 3, 4] and seen[REVERSED] == [4, 3, 2, 1, 0]
    assert sorted(seen[SHUFFLED]) == seen[FORWARD] and seen[SHUFFLED] not in seen[:2]


def test_a_launch_without_blocks_is_an_error_as_in_cuda(library):
    assert run(library, "no_blocks")[0] == 9  # cudaErrorInvalidConfiguration
