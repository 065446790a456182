"""The CUDA kernels, on the emulator and on a GPU if there is one.

The tests cover lists of any length, plans that run repeatedly, and accesses beyond a tensor.
test_reference.py compares every op with plain PyTorch.
"""

import itertools

import pytest
import torch
from cuda_cases import (
    MANY,
    PLANS,
    Device,
    EveryOp,
    Host,
    Walled,
    accumulate,
    accumulate_cast,
    assert_same,
    on_host,
    pack,
    place_all,
    unpack,
    unscale_norm,
)
from op_cases import DTYPES, assert_same_bits, flags, make_plan, random_values, sums

from pyengine.ops.plan import BucketPlan


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: waking torch's threads for thousands of small tensors costs more than all the rest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Two rounds of the 256 block lanes and a part of a third. Only every 128th block is nonzero, so that the
# order of a few blocks decides the last bit.
@pytest.mark.parametrize("seed", range(2))
def test_a_long_sum_is_taken_in_the_order_of_the_cpu(device, seed, scale):
    numel = 640 * 8192 + 77
    layout = BucketPlan([0, 1], [1, numel])
    x = torch.exp2(6 * torch.rand(numel, generator=torch.Generator().manual_seed(seed)))
    x *= torch.arange(numel).div(8192, rounding_mode="floor").remainder(128) == 0
    results = []
    for where in (device, Host()):
        plan = where.plan([0, 1], [1, numel])
        sumsq = where.place(sums(layout))
        seen = where.place(flags(layout))
        tensors = place_all(where, [None, x])
        plan.unscale_norm(tensors, None, where.place(scale), sumsq=sumsq, nonfinite=seen)
        results.append((sumsq, seen))
    assert_same(*results)


@pytest.mark.parametrize(
    "layout",
    [*MANY.values(), *map(make_plan, ([], [0, 0], [0, 1, 0]))],
    ids=lambda plan: str(plan.numels)[:20],
)
def test_many_small_slots_and_next_to_nothing(device, layout):
    ops = EveryOp(device, layout)
    ops.run()
    assert_same(ops.results, on_host(layout))


def test_lists_in_device_memory(kernels):
    layout, device = MANY["300 slots"], Device.emulated(kernels)
    ops = EveryOp(device, layout)
    ops.plan.most_inline = kernels.INLINE_SLOTS
    ops.run()
    assert_same(ops.results, on_host(layout))


@pytest.mark.parametrize("num", [256, 257, 4000, 4001])
def test_lists_around_what_parameters_hold(device, num, one):
    flat = device.place(torch.zeros(num))
    tensors = place_all(device, torch.arange(1.0, num + 1).split(1))
    device.plan(range(num), [1] * num).pack_(flat, tensors, device.place(one))
    assert_same_bits(flat.cpu(), torch.arange(1.0, num + 1))


def test_a_list_is_read_and_another_of_many_slots_written(device, scale):
    arguments = MANY["300 slots"], torch.bfloat16, torch.float32, (0, 0), scale
    assert_same(unscale_norm(device, *arguments), unscale_norm(Host(), *arguments))


def test_a_list_that_parameters_cannot_hold_is_refused(kernels, one):
    plan = Device.emulated(kernels).plan([*range(4001)], [1] * 4001)
    plan.most_inline = 5000
    with pytest.raises(ValueError, match="4001 addresses; expected at most 256, or a list in device memory"):
        plan.pack_(torch.zeros(4001), torch.ones(4001).split(1), one)


def test_a_plan_runs_again_and_again(device):
    # The second round finds the tickets and partial sums that the first one left.
    layout = PLANS["odd offsets"]
    ops = EveryOp(device, layout)
    for _ in range(3):
        ops.restore()
        ops.run()
        assert_same(ops.results, on_host(layout))


def test_a_slot_without_a_tensor_sums_to_zero_after_one_with(device, one):
    layout, scale = make_plan([40_001, 5]), device.place(one)
    plan, seen = device.plan(layout.offsets, layout.numels), device.place(flags(layout))
    x, sumsq = place_all(device, [torch.ones(40_001), torch.ones(5)]), device.place(sums(layout))
    got = []
    for tensors in (x, [None, x[1]], [None, None], x):
        plan.unscale_norm(tensors, None, scale, sumsq=sumsq, nonfinite=seen)
        got.append(sumsq.tolist())
    assert got == [[40_001, 5], [0, 5], [0, 0], [40_001, 5]]


@pytest.mark.parametrize(
    "layout", [PLANS["odd offsets"], make_plan([600_001, 3])], ids=["sizes", "one large"]
)
def test_the_order_of_blocks_and_threads_does_not_matter(disordered, layout):
    ops = EveryOp(Device.emulated(disordered), layout)
    ops.run()
    assert_same(ops.results, on_host(layout))


# ---- memory: on the emulator, an access beyond a tensor fails the launch ----


@pytest.fixture(params=[False, True], ids=["wall before", "wall behind"])
def walls(kernels, request):
    return Walled(kernels, request.param)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 255, 258, 260, 8193, 16385])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_a_tensor_is_touched(walls, numel, dtype, monkeypatch, scale):
    monkeypatch.setattr(
        "cuda_cases.make_flat", lambda plan, dtype: random_values(plan.flat_numel, dtype, seed=1)
    )
    layout = BucketPlan([0], [numel])
    for other, first in itertools.product(DTYPES, (True, False)):
        assert_same(
            pack(walls, layout, dtype, other, (0, 0), scale),
            pack(Host(), layout, dtype, other, (0, 0), scale),
        )
        unpack(walls, layout, dtype, other, (0, 0), scale)
        accumulate_cast(walls, layout, dtype, other, first, (0, 0), scale)
        accumulate(walls, layout, dtype, first, (0, 0), scale)
    for out in (None, "in place", *DTYPES):
        arguments = layout, dtype, out, (0, 0), scale
        assert_same(unscale_norm(walls, *arguments), unscale_norm(Host(), *arguments))
