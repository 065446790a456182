"""The definition of an exact sum in rational arithmetic, and terms to test it with."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

BLOCK = 64
TERMS = [1, 2, 3, 8, 12, 64, 256, 4096]
# Two slots with a gap of one block. The last block of the first slot has 2 elements, that of the second 62.
OFFSETS, NUMELS, NUMEL = (0, 256), (130, 62), 320

Limbs = tuple[list[int], list[int], list[int]]  # hi, lo, bins


# ---- the definition ----


def width_of(terms: int) -> int:
    return 31 - math.ceil(math.log2(terms))


def bin_of(values: Sequence[float], width: int) -> int:
    if not all(math.isfinite(value) and abs(value) < 2.0**126 for value in values):
        return 255
    largest = max(map(abs, values))
    if largest < 2.0**-126:
        return 0
    _, exponent = math.frexp(largest)  # 2^(exponent - 1) <= largest < 2^exponent
    return max(2, math.ceil(Fraction(exponent + 126, width)))


def unit_of_lo(bin: int, width: int) -> Fraction:
    return Fraction(2) ** ((bin - 2) * width - 125)


def slices(value: float, bin: int, width: int) -> tuple[int, int]:
    lo_unit = unit_of_lo(bin, width)
    hi_unit = lo_unit * 2**width
    hi = round(Fraction(value) / hi_unit)  # Fractions round to even
    return hi, round((Fraction(value) - hi * hi_unit) / lo_unit)


def sum_of_block(terms: Sequence[Sequence[float]], width: int) -> Limbs:
    """Sum the terms of one block; their order does not matter."""
    bin = max((bin_of(term, width) for term in terms), default=0)
    size = len(terms[0]) if terms else 0
    if bin in (0, 255):
        return [0] * size, [0] * size, [bin]
    pairs = [[slices(term[i], bin, width) for term in terms] for i in range(size)]
    return [sum(hi for hi, _ in pair) for pair in pairs], [sum(lo for _, lo in pair) for pair in pairs], [bin]


def sum_of(terms: Sequence[torch.Tensor], width: int) -> Limbs:
    """Sum whole flat tensors, whose size is a multiple of 64."""
    result = [], [], []
    for begin in range(0, terms[0].numel(), BLOCK):
        block = sum_of_block([term[begin : begin + BLOCK].tolist() for term in terms], width)
        for limb, part in zip(result, block, strict=True):
            limb.extend(part)
    return result


FORMATS = {torch.float32: (24, -149, 128), torch.bfloat16: (8, -133, 128), torch.float16: (11, -24, 16)}


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """Return the nearest value of a dtype, ties to even; a value that is rounded to zero keeps its sign."""
    precision, lowest, limit = FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent += abs(value) >= Fraction(2) ** exponent  # 2^(exponent - 1) <= |value| < 2^exponent
    unit = Fraction(2) ** max(exponent - precision, lowest)
    nearest = round(value / unit) * unit
    return math.copysign(math.inf if abs(nearest) >= Fraction(2) ** limit else float(nearest), value)


# ---- sums under test ----


def make_aligned_plan(numels: list[int]) -> tuple[BucketPlan, int]:
    """Return a plan with slots at multiples of 64 and a block between them, and the flat buffer's numel."""
    offsets, end = [], BLOCK
    for numel in numels:
        offsets.append(end)
        end += -(-numel // BLOCK) * BLOCK + BLOCK
    return BucketPlan(offsets, numels), end


def make_sum(terms: int, *, plan: BucketPlan | None = None, numel: int = NUMEL) -> ExactSum:
    plan = plan or BucketPlan(OFFSETS, NUMELS)
    return ExactSum(plan, numel=numel, terms=terms, device=torch.device("cpu"))


def make_reference(terms: int, **where) -> ExactSum:
    """Return a sum that runs in plain PyTorch."""
    total = make_sum(terms, **where)
    total._runner = None
    return total


def parts(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of the slots of a flat term."""
    return [flat[offset : offset + numel].clone() for offset, numel in zip(OFFSETS, NUMELS, strict=True)]


def deposit_all(total: ExactSum, terms: Sequence[list[torch.Tensor | None]]) -> list[int]:
    """Deposit terms in order; return which slots were flagged."""
    seen = torch.zeros(len(total._plan.numels), dtype=torch.uint8)
    for index, term in enumerate(terms):
        total.deposit_(term, first=index == 0, nonfinite=seen)
    return seen.tolist()


def merge(sums: Sequence[ExactSum]) -> ExactSum:
    """Merge sums as ranks do: take the largest bins, align the limbs, and add the integers."""
    bins = torch.stack([each.bins for each in sums]).amax(0)
    for each in sums:
        each.align_(bins)
    for limb in ("hi", "lo"):
        getattr(sums[0], limb).copy_(sum(getattr(each, limb) for each in sums))
    return sums[0]


def merge_in_turn(sums: Sequence[ExactSum]) -> ExactSum:
    """Merge sums as a rank does that resumes from the states of other ranks."""
    for other in sums[1:]:
        sums[0].merge_(other)
    return sums[0]


def limbs(total: ExactSum) -> Limbs:
    return total.hi.tolist(), total.lo.tolist(), total.bins.tolist()


# ---- terms ----


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return the values with zeros outside the slots."""
    flat = torch.zeros(NUMEL)
    for offset, numel in zip(OFFSETS, NUMELS, strict=True):
        flat[offset : offset + numel] = values[offset : offset + numel]
    return flat


def _many_binades(random, width):
    scale = torch.randint(-60, 40, (NUMEL,), generator=random)
    return torch.ldexp(torch.randn(NUMEL, generator=random), scale)


def _one_scale_a_block(random, width):
    scale = torch.randint(-120, 120, (NUMEL // BLOCK,), generator=random).repeat_interleave(BLOCK)
    return torch.ldexp(torch.randn(NUMEL, generator=random), scale)


def _gradients(random, width):
    return torch.randn(NUMEL, generator=random) * 1e-3


def _spikes(random, width):
    spike = torch.rand(NUMEL, generator=random) < 0.05
    return torch.randn(NUMEL, generator=random) * torch.where(spike, 1e4, 1.0)


def _at_the_bound(random, width):
    """Return the largest magnitude of a bin, which gives the largest possible limbs."""
    limit = torch.tensor(2.0 ** (3 * width - 126))
    return torch.nextafter(limit, torch.tensor(0.0)).repeat(NUMEL)


def _ties(random, width):
    """Return odd multiples of half a unit of lo, or of hi."""
    half = 2.0 ** (2 * width - 126) * (2 * torch.randint(-2000, 2000, (NUMEL,), generator=random) + 1)
    return torch.where(torch.rand(NUMEL, generator=random) < 0.5, half, half * 2.0**-width)


def _denormals(random, width):
    return torch.randint(-(2**23), 2**23 + 1, (NUMEL,), generator=random).float() * 2.0**-149


def _extremes(random, width):
    largest = torch.nextafter(torch.tensor(2.0**126), torch.tensor(0.0)).item()
    values = torch.tensor([2.0**-126, 1.5 * 2.0**-126, 2.0**-125, 2.0**-149, 0.0, -0.0, largest, 2.0**125])
    chosen = values[torch.randint(len(values), (NUMEL,), generator=random)]
    return chosen * (1 - 2 * torch.randint(2, (NUMEL,), generator=random))


DISTRIBUTIONS = {
    make.__name__.strip("_"): make
    for make in (
        _many_binades,
        _one_scale_a_block,
        _gradients,
        _spikes,
        _at_the_bound,
        _ties,
        _denormals,
        _extremes,
    )
}


def make_terms(name: str, terms: int, num: int, seed: int = 0) -> list[torch.Tensor]:
    """Return `num` flat terms for a sum of at most `terms` terms.

    In "cancellation", the second half nearly cancels the first.
    """
    random = torch.Generator().manual_seed(seed)
    if name == "cancellation":
        half = [_gradients(random, 0) for _ in range((num + 1) // 2)]
        return [_flat(each) for each in (half + [-each * (1 - 2.0**-20) for each in half])[:num]]
    return [_flat(DISTRIBUTIONS[name](random, width_of(terms))) for _ in range(num)]


ALL_DISTRIBUTIONS = [*DISTRIBUTIONS, "cancellation"]
