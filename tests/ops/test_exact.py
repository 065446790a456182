"""ExactSum: the same integers for any order, grouping and number of ranks, rounded once."""

import math
from fractions import Fraction

import pytest
import torch
from exact_oracle import (
    ALL_DISTRIBUTIONS,
    BLOCK,
    NUMEL,
    NUMELS,
    TERMS,
    deposit_all,
    limbs,
    make_aligned_plan,
    make_reference,
    make_sum,
    make_terms,
    merge,
    merge_in_turn,
    parts,
    rounded,
    slices,
    sum_of,
    sum_of_block,
    unit_of_lo,
    width_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import DTYPES, INF, NAN, SHIFTS, assert_same_bits, flags, random_values

from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

CPU = torch.device("cpu")


def assert_same_sum(got: ExactSum, want: ExactSum) -> None:
    for name in ("bins", "hi", "lo"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


# ---- the integers ----


@pytest.mark.parametrize("terms", [1, 3, 12, 4096])
@pytest.mark.parametrize("name", ALL_DISTRIBUTIONS)
def test_the_limbs_are_the_sums_of_slices(isa, name, terms):
    flats = make_terms(name, terms, min(terms, 12))
    total = make_sum(terms)
    deposit_all(total, [parts(flat) for flat in flats])
    assert limbs(total) == sum_of(flats, width_of(terms))


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("together", [merge, merge_in_turn])
@settings(deadline=None, max_examples=100)
@given(
    terms=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=8),
    limit=st.sampled_from(TERMS[3:]),
    data=st.data(),
)
def test_any_terms_in_any_groups_give_the_sums_of_slices(together, terms, limit, data):
    plan = BucketPlan([0], [3])
    ranks = [data.draw(st.integers(0, 2)) for _ in terms]
    sums = [make_sum(limit, plan=plan, numel=BLOCK) for _ in range(3)]
    for rank, total in enumerate(sums):
        mine = [[torch.tensor(term)] for term, at in zip(terms, ranks, strict=True) if at == rank]
        deposit_all(total, mine)
    total = together(sums)
    want = sum_of_block(terms, width_of(limit))
    assert (total.hi[:3].tolist(), total.lo[:3].tolist(), total.bins.tolist()) == want
    assert not total.hi[3:].any() and not total.lo[3:].any()


@pytest.mark.parametrize("terms", [1, 3, 64, 4096])
@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_terms_as_promised_at_the_bound_stay_within_2_to_the_30(terms, sign):
    width = width_of(terms)
    below = torch.nextafter(torch.tensor(2.0 ** (3 * width - 126)), torch.tensor(0.0)).item()
    # Values with the largest hi, and with the largest lo (half a unit of hi).
    value = torch.full((BLOCK,), sign * below)
    value[1::2] = sign * 2.0 ** (2 * width - 126)
    plan = BucketPlan([0], [BLOCK])
    total = make_sum(terms, plan=plan, numel=BLOCK)
    deposit_all(total, [plan.pointers([value])] * terms)
    for i in (0, 1):
        assert (total.hi[i].item(), total.lo[i].item()) == tuple(
            terms * limb for limb in slices(value[i].item(), 3, width)
        )
    assert max(total.hi.abs().max(), total.lo.abs().max()) <= 2**30


@pytest.mark.parametrize("name", ["denormals", "extremes"])
def test_flushing_denormals_changes_nothing(isa, name):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flats = [parts(flat) for flat in make_terms(name, 8, 8)]
        total, out = make_sum(8), torch.empty(NUMEL)
        deposit_all(total, flats)
        total.round_(out)
    finally:
        torch.set_flush_denormal(False)
    want, want_out = make_sum(8), torch.empty(NUMEL)
    deposit_all(want, flats)
    want.round_(want_out)
    assert_same_sum(total, want)
    assert_same_bits(out, want_out)


# ---- memory ----


SIZES = [0, 1, 63, 64, 65, 255, 257, 8191, 8192, 8193, 16383, 16384, 16385, 40001]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_and_alignment_equals_the_reference(isa, threads, dtype, shift):
    plan, numel = make_aligned_plan(SIZES)
    total, want = (make(12, plan=plan, numel=numel) for make in (make_sum, make_reference))
    terms = [[random_values(n + shift, dtype, seed=n + k)[shift:] for n in SIZES] for k in range(3)]
    terms[0][3] = terms[1][4] = terms[2][9] = None
    terms[1][-1][777] = NAN
    flagged = deposit_all(total, terms)
    assert flagged == deposit_all(want, terms) == [0] * 13 + [1]
    assert_same_sum(total, want)
    total.align_(raised := (total.bins.int() + (total.bins % 254 > 0)).clamp(max=255).to(torch.uint8))
    want.align_(raised)
    assert_same_sum(total, want)
    for out_dtype in DTYPES:
        got, expected = (torch.empty(numel + shift, dtype=out_dtype)[shift:] for _ in range(2))
        total.round_(got)
        want.round_(expected)
        assert_same_bits(got, expected)


def test_large_sums_equal_the_reference_on_any_number_of_threads(threads):
    numels = [3 * 2**20 + 7, 3, 65_536, 0, 70_001]
    plan, numel = make_aligned_plan(numels)
    total, want = (make(64, plan=plan, numel=numel) for make in (make_sum, make_reference))
    terms = [[random_values(n, torch.bfloat16, seed=k) for n in numels] for k in range(2)]
    for each in (total, want):
        each.hi.fill_(7)
        deposit_all(each, terms)
    assert_same_sum(total, want)
    out, expected = torch.empty(numel), torch.empty(numel)
    want.round_(expected)
    for memory in (out, total.hi.view(torch.float32)):
        total.round_(memory)
        assert_same_bits(memory, expected)


def test_a_range_of_a_sum_is_rounded_in_its_own_memory(isa):
    plan, numel = make_aligned_plan(SIZES)
    total = make_sum(12, plan=plan, numel=numel)
    deposit_all(total, [[random_values(n, torch.float32, seed=n + k) for n in SIZES] for k in range(3)])
    out = torch.empty(numel)
    total.round_(out)
    hi = total.hi.clone()
    total.between(64, 256).round_(total.hi[64:256].view(torch.float32))
    assert_same_bits(total.hi[64:256].view(torch.float32), out[64:256])
    assert torch.equal(total.hi[:64], hi[:64]) and torch.equal(total.hi[256:], hi[256:])
    for start, stop in [(0, 100), (-64, 64), (64, 0), (0, numel + 64)]:
        with pytest.raises(ValueError, match=f"start={start}, stop={stop}; expected multiples of 64"):
            total.between(start, stop)


def test_a_first_deposit_forgets_what_was_there_and_leaves_gaps_alone(isa):
    total = make_sum(8)
    for limb in (total.hi, total.lo, total.bins):
        limb.fill_(77)
    total.deposit_([torch.ones(NUMELS[0]), None], first=True, nonfinite=flags(total._plan))
    written = torch.zeros(NUMEL, dtype=torch.bool)
    written[:192] = written[256:] = True  # whole blocks of the slots
    assert (total.hi[~written] == 77).all() and (total.lo[~written] == 77).all()
    assert total.bins.tolist() == [5, 5, 5, 77, 0]  # 1.0 has the biased exponent 127, and w = 28
    assert (total.hi[: NUMELS[0]] == 2 ** (125 - 4 * 28)).all() and not total.lo[written].any()
    assert not total.hi[NUMELS[0] : 192].any() and not total.hi[256:].any()


@pytest.mark.parametrize(("value", "bin"), [(-0.0, 0), (1e-40, 0), (NAN, 255)])
def test_a_first_deposit_without_a_grid_clears_the_limbs(isa, value, bin):
    total, out = make_sum(8), torch.empty(NUMEL)
    for limb in (total.hi, total.lo, total.bins):
        limb.fill_(77)
    total.deposit_([torch.full((n,), value) for n in NUMELS], first=True, nonfinite=flags(total._plan))
    assert total.bins.tolist() == [bin, bin, bin, 77, bin]
    limbs = torch.stack([total.hi, total.lo])
    assert not limbs[:, :192].any() and not limbs[:, 256:].any()
    total.round_(out)
    assert_same_bits(out[:192], torch.full((192,), NAN if bin else 0.0))


# ---- poison ----


@pytest.mark.parametrize("bad", [-INF, NAN, 2.0**126])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("position", [63, 64, 129])
def test_a_block_with_a_non_finite_or_huge_element_is_poisoned_and_no_other(isa, bad, when, position):
    flats = make_terms("gradients", 3, 3)
    want = make_sum(3)
    deposit_all(want, [parts(flat) for flat in flats])
    flats[when][position] = bad
    total, out, clean = make_sum(3), torch.empty(NUMEL), torch.empty(NUMEL)
    assert deposit_all(total, [parts(flat) for flat in flats]) == [1, 0]
    total.round_(out)
    want.round_(clean)
    block = slice(position // BLOCK * BLOCK, position // BLOCK * BLOCK + BLOCK)
    assert total.bins[position // BLOCK] == 255
    assert not total.hi[block].any() and not total.lo[block].any()
    assert out[block].isnan().all()
    clean[block] = NAN
    assert_same_bits(out, clean)


def test_flags_are_set_by_this_term_alone_and_never_cleared(isa):
    total, seen = make_sum(8), torch.tensor([2, 0], dtype=torch.uint8)
    good, bad = [torch.ones(n) for n in NUMELS], [torch.full((NUMELS[0],), NAN), None]
    total.deposit_(bad, first=True, nonfinite=seen)
    assert seen.tolist() == [3, 0]
    seen.zero_()
    total.deposit_(good, first=False, nonfinite=seen)
    assert seen.tolist() == [0, 0] and total.bins[:3].tolist() == [255] * 3
    total.deposit_(good, first=True, nonfinite=seen)
    assert 255 not in total.bins.tolist()


# ---- align ----


@pytest.mark.parametrize("name", ["many_binades", "ties", "at_the_bound", "extremes", "cancellation"])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_shifting_afterwards_is_depositing_in_the_larger_bin(isa, name, distance):
    flats = [parts(flat) for flat in make_terms(name, 8, 5)]
    low, high = make_sum(8), make_sum(8)
    deposit_all(low, flats)
    most = math.ceil(252 / low.width)
    bins = torch.where(low.bins > 0, (low.bins + distance).clamp(max=most), 0).to(torch.uint8)
    high.align_(bins)
    for flat in flats:
        high.deposit_(flat, first=False, nonfinite=flags(high._plan))
    low.align_(bins)
    assert torch.equal(low.bins, bins)
    assert_same_sum(low, high)
    low.align_(torch.full_like(bins, 255))  # poison
    assert not low.hi.any() and not low.lo.any()


# ---- round ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2, 64, 4096])
def test_the_result_is_the_exact_integer_rounded_once(isa, terms, dtype):
    total, random = make_sum(terms), torch.Generator().manual_seed(terms)
    width = total.width
    # Sums of every bit length, including ties of each dtype and their neighbours, which would be wrong if
    # they were rounded twice.
    length = torch.randint(1, 31 + width, (NUMEL,), generator=random)
    value = torch.randint(2**62, (NUMEL,), generator=random) >> (62 - length)
    kept = torch.tensor([24, 11, 8])[torch.randint(3, (NUMEL,), generator=random)]
    tie = ((value >> (length - kept).clamp(min=0)) * 2 + 1) << (length - kept - 1).clamp(min=0)
    tie += torch.randint(-1, 2, (NUMEL,), generator=random)
    value = torch.where(torch.rand(NUMEL, generator=random) < 0.7, tie, value).clamp(max=2 ** (30 + width))
    value *= 1 - 2 * torch.randint(2, (NUMEL,), generator=random)
    total.hi.copy_(value >> width)
    total.lo.copy_(value - (total.hi.long() << width))
    bins = [2, 3, math.ceil(Fraction(110, width)), math.ceil(Fraction(252, width)), 4]
    total.bins.copy_(torch.tensor(bins))
    out = torch.empty(NUMEL, dtype=dtype)
    total.round_(out)
    want = [rounded(v * unit_of_lo(bins[i // BLOCK], width), dtype) for i, v in enumerate(value.tolist())]
    assert_same_bits(out, torch.tensor(want, dtype=torch.float64).to(dtype))


# ---- invalid arguments ----


@pytest.mark.parametrize(
    ("offsets", "numel", "terms", "words"),
    [
        ([0], 64, 0, "terms=0; expected 1 to 4096"),
        ([0], 64, 4097, "terms=4097; expected 1 to 4096.*deposit their sum"),
        ([0], 100, 8, "numel=100; expected a multiple of 64.*nearest is 128"),
        ([64], 64, 8, "numel=64; expected .* at least flat_numel=67; the nearest is 128"),
        ([32], 64, 8, "slot 0 has offset 32; expected a multiple of 64"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(offsets, numel, terms, words):
    with pytest.raises(ValueError, match=words):
        ExactSum(BucketPlan(offsets, [3]), numel=numel, terms=terms, device=CPU)


@pytest.mark.parametrize("device", [torch.device("cpu:0"), "cpu"], ids=repr)
def test_a_device_may_be_named_in_any_way_that_torch_takes(device):
    for memory in (None, torch.zeros(2 * BLOCK, dtype=torch.int32)):
        total = ExactSum(BucketPlan([0], [3]), numel=BLOCK, terms=2, device=device, limbs=memory)
        total.deposit_([torch.ones(3)], first=True, nonfinite=flags(total._plan))
        assert total.hi.device == CPU


TOTAL = make_sum(8)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "words"),
    [
        ("deposit_", {"tensors": [None, torch.ones(3)]}, ValueError, r"\[1\] has 3 elements; expected 62"),
        ("deposit_", {"nonfinite": torch.zeros(2)}, TypeError, "nonfinite is torch.float32"),
        (
            "deposit_",
            {"nonfinite": torch.zeros(3, dtype=torch.uint8)},
            ValueError,
            "expected 2, one per slot",
        ),
        ("align_", {"bins": torch.zeros(5)}, TypeError, "bins is torch.float32.*expected dtype torch.uint8"),
        (
            "align_",
            {"bins": torch.zeros(6, dtype=torch.uint8)},
            ValueError,
            "bins has 6 elements; expected 5",
        ),
        ("merge_", {"other": make_sum(4096)}, ValueError, "other is ExactSum.*expected a sum like ExactSum"),
        ("round_", {"out": torch.zeros(NUMEL).double()}, TypeError, "out is torch.float64"),
        ("round_", {"out": torch.zeros(NUMEL - 1)}, ValueError, "out is .*at least 320 elements"),
        ("round_", {"out": TOTAL.hi.view(torch.bfloat16)}, ValueError, "expected memory of its own"),
        ("round_", {"out": TOTAL.lo.view(torch.float16)}, ValueError, "expected memory of its own"),
    ],
)
def test_arguments_that_do_not_fit_are_named(method, arguments, error, words):
    defaults = {"deposit_": {"tensors": [None, None], "first": True, "nonfinite": flags(TOTAL._plan)}}
    with pytest.raises(error, match=words):
        getattr(TOTAL, method)(**(defaults.get(method, {}) | arguments))
