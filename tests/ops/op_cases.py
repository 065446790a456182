"""Layouts, tensors and comparisons that the tests of every op share."""

import functools

import torch

from pyengine.ops.plan import BucketPlan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Empty slots at the beginning, in the middle and at the end; one element; sizes around 16 lanes, around a
# block of 8192 elements and a chunk of two blocks; several chunks.
NUMELS = [0, 1, 15, 16, 17, 0, 99, 8191, 8193, 16383, 16384, 16385, 40001, 0]
# Numbers of elements by which tensors are moved from an aligned address.
SHIFTS = [0, 1]
ABSENT = 6  # the slot that has no tensor in the tests with None

INF, NAN = float("inf"), float("nan")
# For a scale of 1: every class of value, -0, denormals and the largest value of each dtype, ties of each
# cast.
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-40, 6e-8, -3e-8, 65504.0, 65519.9, 65520.0, 3.4028235e38,
           3.3895314e38, 1.00390625, 1.01171875, 1.00048828125, 1.00146484375, 2.98e-8,
           8.9407e-8]  # fmt: skip
# Wire dtype, a value in acc, wire_scale, and whether (value + 1) * wire_scale overflows; fp16 overflows from
# 65520 on.
OVERFLOWS = [
    (torch.float32, 65519.0, 1.0, 0),
    (torch.bfloat16, 65519.0, 1.0, 0),
    (torch.float16, 65518.0, 1.0, 0),
    (torch.float16, 65519.0, 1.0, 1),
    (torch.float16, 40000.0, 2.0, 1),
    (torch.float16, 100000.0, 0.5, 0),
]


def make_plan(numels: list[int] = NUMELS, gap: int = 3) -> BucketPlan:
    offsets, end = [], gap
    for numel in numels:
        offsets.append(end)
        end += numel + gap
    return BucketPlan(offsets, numels)


def make_flat(plan: BucketPlan, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    return random_values(plan.flat_numel + 5 + shift, dtype, seed=1)[shift:]


def make_tensors(plan: BucketPlan, dtype: torch.dtype, shift: int = 0) -> list[torch.Tensor | None]:
    tensors = [random_values(numel + shift, dtype, seed=i)[shift:] for i, numel in enumerate(plan.numels)]
    if len(tensors) > ABSENT:
        tensors[ABSENT] = None
    return tensors


def random_values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values over many binades, so that rounding, fp16 denormals and cancellation all occur."""
    return _random_values(numel, seed).to(dtype, copy=True)


@functools.lru_cache(maxsize=64)
def _random_values(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randn(numel, generator=generator)
    exponent = torch.randint(-26, 12, (numel,), generator=generator)
    return torch.ldexp(mantissa, exponent)


def clone(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]


def flags(plan: BucketPlan) -> torch.Tensor:
    return torch.zeros(len(plan.numels), dtype=torch.uint8)


def sums(plan: BucketPlan) -> torch.Tensor:
    return torch.full((len(plan.numels),), -1.0, dtype=torch.float64)


def assert_same_bits(got, want) -> None:
    """Check that bits are equal: -0 differs from 0, any NaN equals NaN. Lists are compared by entry."""
    if isinstance(got, list):
        assert [t is None for t in got] == [t is None for t in want]
        got, want = ([t for t in tensors if t is not None] for tensors in (got, want))
        if not got:
            return
        got, want = torch.cat(got), torch.cat(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    finite = ~want.isnan()
    assert torch.equal(got[finite].view(integer), want[finite].view(integer))
