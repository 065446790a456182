"""An op writes to memory of its own or exactly to the slot that it reads; any other overlap is refused."""

from __future__ import annotations

import pytest
import torch

from pyengine.ops import native, overlap
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

ONE = torch.tensor(1.0)


@pytest.fixture(params=["core", "reference"])
def plan(request, monkeypatch):
    """Return a plan of two slots of four elements with a gap, with the core and without it."""
    if request.param == "reference":
        monkeypatch.setattr(native, "core", lambda: None)
    return BucketPlan([0, 8], [4, 4])


def _flags(plan: BucketPlan) -> torch.Tensor:
    return torch.zeros(len(plan.numels), dtype=torch.uint8)


def _pack(plan, flat, tensors, scale=ONE):
    plan.pack_(flat, tensors, scale)


def _unpack(plan, flat, tensors, scale=ONE):
    plan.unpack_(tensors, flat, scale)


def _accumulate(plan, flat, tensors, scale=ONE):
    plan.accumulate_(flat, tensors, scale, first=False, nonfinite=_flags(plan))


def _accumulate_cast(plan, flat, tensors, scale=ONE):
    acc = torch.zeros(12)
    plan.accumulate_cast_(flat, acc, tensors, ONE, scale, first=False, nonfinite=_flags(plan))


OVER_FLAT = [_pack, _unpack, _accumulate, _accumulate_cast]


@pytest.mark.parametrize("op", OVER_FLAT)
@pytest.mark.parametrize("begins", [(1, None), (6, None), (9, None), (8, 0)], ids=str)
def test_a_tensor_that_overlaps_another_slot_of_the_flat_is_refused_and_nothing_is_written(plan, op, begins):
    flat = torch.arange(13.0)
    with pytest.raises(ValueError, match=r"shares memory with .* expected memory of its own"):
        op(plan, flat, [None if begin is None else flat[begin : begin + 4] for begin in begins])
    assert torch.equal(flat, torch.arange(13.0))


@pytest.mark.parametrize("op", OVER_FLAT)
def test_a_slot_itself_works_in_place_and_a_gap_is_free(plan, op):
    flat = torch.arange(12.0)
    op(plan, flat, [flat[:4], flat[8:]])
    assert torch.equal(flat[4:8], torch.arange(4.0, 8.0))
    op(plan, flat, [flat[4:8], None])


@pytest.mark.parametrize("op", [_pack, _accumulate_cast])
def test_the_same_memory_in_another_dtype_is_refused(plan, op):
    flat = torch.zeros(24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="shares memory"):
        op(plan, flat, [flat[:8].view(torch.float32), None])


@pytest.mark.parametrize("op", OVER_FLAT)
@pytest.mark.parametrize("index", [0, 9])
def test_a_scale_inside_what_is_written_is_refused(plan, op, index):
    flat, tensors = torch.ones(12), [torch.ones(4), torch.ones(4)]
    inside = tensors[1][2] if op is _unpack else flat[index]
    with pytest.raises(ValueError, match="shares memory with .*scale"):
        op(plan, flat, tensors, inside)
    outside = flat[5]  # in the gap
    op(plan, flat, tensors, outside)


def test_the_wire_is_the_sum_itself_or_memory_of_its_own(plan):
    acc, grads, flags = torch.zeros(14), [torch.ones(4), None], _flags(plan)
    plan.accumulate_cast_(acc, acc, grads, ONE, ONE, first=False, nonfinite=flags)
    for wire in (acc.view(torch.bfloat16), acc[1:]):
        with pytest.raises(ValueError, match="slot . of wire shares memory with slot . of acc"):
            plan.accumulate_cast_(wire, acc, grads, ONE, ONE, first=False, nonfinite=flags)
        plan.accumulate_cast_(wire, acc, grads, ONE, ONE, first=True, nonfinite=flags)  # acc is not read


def _norm(plan, tensors, out, scale=ONE):
    sumsq = torch.zeros(len(plan.numels), dtype=torch.float64)
    plan.unscale_norm(tensors, out, scale, sumsq=sumsq, nonfinite=_flags(plan))


def test_a_norm_is_taken_in_place_or_into_other_memory(plan):
    memory = torch.ones(9)
    tensors = [memory[:4], memory[4:8]]
    _norm(plan, tensors, tensors)
    _norm(plan, tensors, [memory[:4], memory[4:8]])
    _norm(plan, tensors, [torch.ones(4), memory[4:8]])
    _norm(plan, [memory[:4], memory[:4]], None)  # read only
    for out in ([memory[1:5], None], [memory[4:8], memory[:4]], [None, memory[5:9]]):
        with pytest.raises(ValueError, match=r"out\[.\] shares memory with tensors\[.\]"):
            _norm(plan, tensors, out)
    with pytest.raises(ValueError, match=r"tensors\[.\] shares memory with scale"):
        _norm(plan, tensors, tensors, memory[2])


@pytest.mark.parametrize("second", [0, 3])
def test_two_tensors_that_are_written_share_nothing(plan, second):
    memory, flat = torch.ones(8), torch.ones(12)
    twice = [memory[:4], memory[second : second + 4]]
    with pytest.raises(ValueError, match=r"tensors\[.\] shares memory with tensors\[.\]"):
        plan.unpack_(twice, flat, ONE)
    with pytest.raises(ValueError, match=r"tensors\[.\] shares memory with tensors\[.\]"):
        _norm(plan, twice, twice)
    plan.pack_(flat, twice, ONE)  # they are only read


def test_a_term_may_not_share_memory_with_its_exact_sum():
    plan = BucketPlan([0], [64])
    total = ExactSum(plan, numel=64, terms=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="limbs shares memory with"):
        total.deposit_([total.hi.view(torch.float32)], first=True, nonfinite=_flags(plan))


def test_the_core_alone_finds_that_a_thousand_tensors_share_no_memory(monkeypatch):
    if native.core() is None:
        pytest.skip("there is no native core")
    monkeypatch.setattr(overlap, "_refuse", lambda spans: pytest.fail(f"looked at {len(spans)} spans"))
    plan = BucketPlan(range(0, 4000, 4), [4] * 1000)
    flat, tensors = torch.zeros(4000), [torch.ones(4) for _ in range(1000)]
    for mine in (tensors, plan.pointers(tensors), list(flat.split(4))):
        for op in OVER_FLAT[:3]:
            op(plan, flat, mine)
        _norm(plan, mine, mine)
