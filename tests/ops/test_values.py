"""How ops round, flag or keep special values: on every instruction set, the emulator and a GPU."""

import pytest
import torch
from cuda_cases import place_all
from op_cases import DTYPES, INF, NAN, OVERFLOWS, SPECIAL, assert_same_bits, flags, make_flat, make_plan, sums


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("position", [0, 1553])
def test_special_values_survive_at_any_position(anywhere, dst, position, one):
    rows = torch.ones(len(SPECIAL), 1554)
    rows[:, position] = torch.tensor(SPECIAL)
    flat = anywhere.place(torch.zeros(rows.numel(), dtype=dst))
    plan = anywhere.plan(range(0, rows.numel(), 1554), [1554] * len(SPECIAL))
    plan.pack_(flat, place_all(anywhere, rows.unbind()), anywhere.place(one))
    assert_same_bits(flat.cpu(), rows.view(-1).to(dst))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_float_bits_are_cast_as_torch_casts_them(anywhere, dtype, one):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (300_001,), generator=generator).to(torch.int32).view(torch.float32)
    flat = anywhere.place(torch.empty(300_001, dtype=dtype))
    anywhere.plan([0], [300_001]).pack_(flat, [anywhere.place(x)], anywhere.place(one))
    assert_same_bits(flat.cpu(), x.to(dtype))


def test_product_and_sum_are_rounded_one_by_one(anywhere):
    # s·g = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused multiply-add would keep the 2^-24, which would
    # remain after -1 - 2^-11 is added.
    acc = anywhere.place(torch.full((40,), -(1 + 2.0**-11)))
    g = anywhere.place(torch.full((40,), 1 + 2.0**-12))
    scale = anywhere.place(torch.tensor(1 + 2.0**-12))
    seen = anywhere.place(torch.zeros(1, dtype=torch.uint8))
    anywhere.plan([0], [40]).accumulate_(acc, [g], scale, first=False, nonfinite=seen)
    assert torch.equal(acc.cpu(), torch.zeros(40))


@pytest.mark.parametrize("bad", [-INF, NAN])
@pytest.mark.parametrize("position", [0, 7, 255, 8191, 16383, 16384, 32770])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slot_of_a_non_finite_value_is_flagged_and_no_other(anywhere, dtype, position, bad, one):
    layout = make_plan([5, 32771, 0, 7])
    grads = [torch.ones(n, dtype=dtype) for n in layout.numels]
    grads[1][position] = bad
    plan, grads = anywhere.plan(layout.offsets, layout.numels), place_all(anywhere, grads)
    acc, wire = (anywhere.place(make_flat(layout, t)) for t in (torch.float32, torch.float16))
    one, sumsq = anywhere.place(one), anywhere.place(sums(layout))
    seen = [anywhere.place(flags(layout)) for _ in range(5)]
    plan.accumulate_(acc, grads, one, first=True, nonfinite=seen[0])
    plan.accumulate_(acc, grads, one, first=False, nonfinite=seen[1])
    assert not acc[layout.offsets[1] + position].isfinite()
    plan.accumulate_cast_(wire, acc, grads, one, one, first=True, nonfinite=seen[2])
    plan.unscale_norm(grads, None, one, sumsq=sumsq, nonfinite=seen[3])
    plan.unscale_norm(grads, grads, one, sumsq=sumsq, nonfinite=seen[4])
    assert [s.tolist() for s in seen] == [[0, 1, 0, 0]] * 5
    assert sumsq[[0, 2, 3]].tolist() == [5, 0, 7] and not sumsq[1].isfinite()


@pytest.mark.parametrize(("wire", "value", "wire_scale", "flagged"), OVERFLOWS)
@pytest.mark.parametrize("position", [0, 999])
def test_a_sum_that_overflows_in_the_cast_is_flagged(
    anywhere, wire, value, wire_scale, flagged, position, one
):
    acc, seen = torch.ones(1000), anywhere.place(torch.zeros(1, dtype=torch.uint8))
    acc[position] = value
    out = anywhere.place(torch.zeros(1000, dtype=wire))
    scales = place_all(anywhere, [one, torch.tensor(wire_scale)])
    grads = [anywhere.place(torch.ones(1000))]
    anywhere.plan([0], [1000]).accumulate_cast_(
        out, anywhere.place(acc), grads, *scales, first=False, nonfinite=seen
    )
    assert seen.tolist() == [flagged]


def test_flags_are_added_to_never_cleared(anywhere, one):
    seen, one = anywhere.place(torch.tensor([2, 1], dtype=torch.uint8)), anywhere.place(one)
    plan = anywhere.plan([0, 2], [2, 2])
    grads = place_all(anywhere, [torch.tensor([1.0, NAN]), torch.ones(2)])
    plan.accumulate_(anywhere.place(torch.zeros(4)), grads, one, first=True, nonfinite=seen)
    assert seen.tolist() == [3, 1]
    plan.unscale_norm(grads, None, one, sumsq=anywhere.place(sums(plan)), nonfinite=seen)
    assert seen.tolist() == [3, 1]


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_non_finite_scale_reaches_the_sum_of_the_tail_and_no_empty_slot(anywhere, value):
    numels = [21, 8, 0, 257]
    layout = make_plan(numels)
    sumsq, seen = anywhere.place(sums(layout)), anywhere.place(flags(layout))
    tensors = place_all(anywhere, [torch.ones(n) for n in numels], 1)
    scale = anywhere.place(torch.tensor(value))
    plan = anywhere.plan(layout.offsets, layout.numels)
    plan.unscale_norm(tensors, None, scale, sumsq=sumsq, nonfinite=seen)
    assert_same_bits(sumsq.cpu(), torch.tensor([value, value, 0.0, value], dtype=torch.float64))
    assert seen.tolist() == [1, 1, 0, 1]


def test_minus_zero_and_denormals_are_kept_by_sums_and_norms(anywhere, one):
    layout, tiny = make_plan([36], gap=0), torch.tensor([-0.0, 1e-45, -1e-40]).repeat(12)
    plan, one = anywhere.plan(layout.offsets, layout.numels), anywhere.place(one)
    acc, kept = anywhere.place(torch.ones(36)), [anywhere.place(tiny)]
    sumsq, seen = anywhere.place(sums(layout)), anywhere.place(flags(layout))
    plan.accumulate_(acc, kept, one, first=True, nonfinite=seen)
    plan.unscale_norm(kept, kept, one, sumsq=sumsq, nonfinite=seen)
    assert_same_bits(acc.cpu(), tiny)
    assert_same_bits(kept[0].cpu(), tiny)
    assert sumsq.item() == pytest.approx(tiny.double().square().sum().item(), rel=2**-50)


def test_a_missing_tensor_packs_as_zeros_whatever_the_scale(anywhere):
    flat = anywhere.place(torch.full((40,), 7.0))
    anywhere.plan([0], [40]).pack_(flat, [None], anywhere.place(torch.tensor(INF)))
    assert_same_bits(flat.cpu(), torch.zeros(40))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_goes_through_unchanged(anywhere, dtype, one):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide, back = anywhere.place(torch.empty(2**16)), anywhere.place(torch.empty(2**16, dtype=dtype))
    plan, one = anywhere.plan([0], [2**16]), anywhere.place(one)
    plan.pack_(wide, [anywhere.place(every)], one)
    assert_same_bits(wide.cpu(), every.float())
    plan.pack_(back, [wide], one)
    assert_same_bits(back.cpu(), every)
