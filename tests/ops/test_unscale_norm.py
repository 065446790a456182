"""unscale_norm: y = tensor * scale, its sum of squares and its finite check in one pass."""

import contextlib
import functools
import mmap
import operator
from unittest import mock

import pytest
import torch
from op_cases import flags, random_values, sums

from pyengine.ops import native
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan


def test_the_sum_does_not_depend_on_alignment_or_destination(isa, scale):
    plan = BucketPlan([0], [5 * 2**20 + 3])  # large enough to stream if the destination is aligned
    x = random_values(plan.numels[0] + 1, torch.float32, seed=9)
    aligned, shifted = x[1:].clone(), x[1:]
    y = torch.empty(plan.numels[0] + 1)
    found = set()
    for source, out in ((aligned, None), (shifted, None), (aligned, [y[1:]]), (aligned, [y[:-1]])):
        total = sums(plan)
        plan.unscale_norm([source], out, scale, sumsq=total, nonfinite=flags(plan))
        found.add(total.item())
    assert len(found) == 1


def add_halves(lanes):
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def sum_in_plain_words(squares):
    """Sum in the order that csrc/plan.h describes, with Python floats, one addition at a time."""
    block_lanes = [0.0] * 256
    for b, begin in enumerate(range(0, len(squares), 8192)):
        block = squares[begin : begin + 8192]
        if not any(block):
            continue
        lanes = [0.0] * 16
        for segment in (block[i : i + 256] for i in range(0, len(block), 256)):
            of_segment = [functools.reduce(operator.add, segment[lane::16], 0.0) for lane in range(16)]
            lanes = [a + b for a, b in zip(lanes, of_segment, strict=True)]
        block_lanes[b % 256] += add_halves(lanes)
    return add_halves(block_lanes)


# A short segment; several segments; one block and a bit; several blocks; two and a half rounds of the 256
# block lanes. In the last case, only every 128th block is nonzero, so that the order of a few blocks decides
# the last bit; in a sum of 641 blocks, differences could cancel.
@pytest.mark.parametrize(
    ("numel", "every"), [(99, 1), (3001, 1), (8192 + 300, 1), (200_003, 1), (640 * 8192 + 77, 128)]
)
@pytest.mark.parametrize("seed", range(2))
def test_the_sum_is_taken_in_the_documented_order(numel, every, seed, scale):
    plan, got = BucketPlan([0], [numel]), torch.empty(1, dtype=torch.float64)
    # Exponents differ by a few: most additions round, so a different order gives different bits.
    x = torch.exp2(6 * torch.rand(numel, generator=torch.Generator().manual_seed(seed)))
    x *= torch.arange(numel).div(8192, rounding_mode="floor").remainder(every) == 0
    plan.unscale_norm([x], None, scale, sumsq=got, nonfinite=flags(plan))
    assert got.item() == sum_in_plain_words((x * scale).double().square().tolist())


def test_a_cast_that_overflows_is_flagged_and_squares_of_the_largest_floats_do_not(isa, one):
    plan, seen, got = (
        BucketPlan([0, 40], [40, 16_385]),
        torch.zeros(2, dtype=torch.uint8),
        torch.empty(2).double(),
    )
    tensors = [torch.full((40,), 65520.0), torch.full((16_385,), -3.4e38)]
    plan.unscale_norm(tensors, None, one, sumsq=got, nonfinite=seen)
    assert seen.tolist() == [0, 0] and torch.isfinite(got).all()
    tensors[1].fill_(1.0)
    plan.unscale_norm(tensors, [t.half() for t in tensors], one, sumsq=got, nonfinite=seen)
    assert seen.tolist() == [1, 0]


@pytest.mark.slow
def test_a_slot_of_more_than_two_to_the_31_elements_is_read_to_its_end(one):
    numel = 2**31 + 19
    # Pages of a private mapping that were never written read as zero and use no memory.
    pages = mmap.mmap(-1, 2 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(pages, dtype=torch.bfloat16)
    x[-1], x[2**31 - 1], x[0] = 3, 2, 1
    plan, got = BucketPlan([0], [numel]), torch.empty(1, dtype=torch.float64)
    plan.unscale_norm([x], None, one, sumsq=got, nonfinite=flags(plan))
    assert got.item() == 14


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sumsq": torch.zeros(1).double()}, ValueError, "sumsq is .*at least 2 elements"),
        ({"out": [torch.ones(2)]}, ValueError, "out has 1 tensors; expected 2"),
        ({"nonfinite": torch.zeros(2)}, TypeError, "nonfinite is torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words, one):
    plan = BucketPlan([0, 2], [2, 3])
    arguments = {"tensors": [torch.ones(2), torch.ones(3)], "out": None, "scale": one,
                 "sumsq": sums(plan), "nonfinite": flags(plan)}  # fmt: skip
    with pytest.raises(error, match=words):
        plan.unscale_norm(**(arguments | change))


@pytest.mark.parametrize("has_core", [True, False])
def test_results_that_share_memory_are_refused_before_anything_is_written(has_core):
    memory = torch.ones(8)
    tensors, bytes_, doubles = [memory[:2], memory[2:4]], memory.view(torch.uint8), memory.view(torch.float64)
    apart = {"sumsq": torch.zeros(2, dtype=torch.float64), "nonfinite": torch.zeros(2, dtype=torch.uint8)}
    flag, one, wide = bytes_[1:3], torch.ones(()), torch.zeros(128)
    with contextlib.ExitStack() as stack:
        if not has_core:
            stack.enter_context(mock.patch.object(native, "core", lambda: None))
        plan = BucketPlan([0, 64], [2, 2])
        exact = ExactSum(plan, numel=128, terms=2, device=torch.device("cpu"))

        def norm(out, scale, **results):
            plan.unscale_norm(tensors, out, scale, **apart | results)

        for says, call in (
            (r"sumsq shares memory with tensors\[0\]", lambda: norm(None, one, sumsq=doubles[:2])),
            (r"sumsq shares memory with out\[1\]", lambda: norm([None, memory[6:]], one, sumsq=doubles[2:])),
            (r"nonfinite shares memory with tensors\[0\]", lambda: norm(tensors, one, nonfinite=flag)),
            ("sumsq shares memory with scale", lambda: norm(None, memory[4], sumsq=doubles[2:])),
            (
                "shares memory with",
                lambda: norm(None, one, sumsq=doubles[2:], nonfinite=bytes_[-2:]),
            ),
            (
                r"nonfinite shares memory with grads\[0\]",
                lambda: plan.accumulate_(torch.zeros(128), tensors, one, first=True, nonfinite=flag),
            ),
            (
                r"nonfinite shares memory with grads\[0\]",
                lambda: plan.accumulate_cast_(
                    torch.zeros(128), torch.zeros(128), tensors, one, one, first=True, nonfinite=flag
                ),
            ),
            (
                r"nonfinite shares memory with tensors\[0\]",
                lambda: exact.deposit_(tensors, first=True, nonfinite=flag),
            ),
            (
                "slot 0 of acc shares memory with scale",
                lambda: plan.accumulate_(wide, [None] * 2, wide[0], first=True, nonfinite=apart["nonfinite"]),
            ),
        ):
            with pytest.raises(ValueError, match=says):
                call()
    assert memory.tolist() == [1] * 8
