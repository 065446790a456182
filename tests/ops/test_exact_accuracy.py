"""The error of ExactSum, against rational arithmetic and against sums in float32."""

import math
from fractions import Fraction

import pytest
import torch
from exact_oracle import (
    ALL_DISTRIBUTIONS,
    BLOCK,
    NUMEL,
    NUMELS,
    OFFSETS,
    deposit_all,
    make_sum,
    make_terms,
    parts,
    rounded,
)
from op_cases import DTYPES, assert_same_bits

from pyengine.ops.plan import BucketPlan


@pytest.mark.parametrize("terms", [1, 12, 256])
@pytest.mark.parametrize("name", ALL_DISTRIBUTIONS)
def test_the_error_keeps_its_bound(name, terms):
    flats = make_terms(name, terms, min(terms, 40))
    total, out = make_sum(terms), torch.empty(NUMEL)
    deposit_all(total, [parts(flat) for flat in flats])
    total.round_(out)
    largest = torch.stack(flats).abs().amax(0).view(-1, BLOCK).amax(1)
    for i, got in enumerate(out.tolist()):
        exact = sum(Fraction(flat[i].item()) for flat in flats)
        # Each term's error is at most half a unit of lo: 2^-w of the block's largest, or 2^-126 in the lowest
        # bin.
        each = max(Fraction(largest[i // BLOCK].item()) / 2**total.width, Fraction(2) ** -126)
        if math.isfinite(got):
            assert abs(Fraction(got) - exact) <= len(flats) * each + abs(exact) * Fraction(2) ** -23
        else:
            assert abs(exact) > Fraction(2) ** 127


@pytest.mark.parametrize("terms", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_that_span_fewer_binades_than_limbs_have_bits_are_rounded_correctly(terms, dtype):
    random = torch.Generator().manual_seed(terms)
    # Multiples of 2^-20 up to 2^-9: eleven bits, which the limbs hold exactly wherever the bin begins.
    num = min(terms, 64)
    flats = [torch.randint(-(2**11), 2**11, (NUMEL,), generator=random) * 2.0**-20 for _ in range(num)]
    total, out = make_sum(terms), torch.empty(NUMEL, dtype=dtype)
    deposit_all(total, [parts(flat) for flat in flats])
    total.round_(out)
    exact = torch.stack(flats).double().sum(0)  # exact: 11 bits and 64 terms
    for part, numel in zip(OFFSETS, NUMELS, strict=True):
        want = torch.tensor([rounded(Fraction(v), dtype) for v in exact[part : part + numel].tolist()])
        assert_same_bits(out[part : part + numel].float() + 0.0, want)


@pytest.mark.parametrize("terms", [8, 256])
@pytest.mark.parametrize("name", ["gradients", "spikes", "cancellation", "many_binades", *range(0, 27, 3)])
def test_the_sum_is_no_worse_than_adding_in_float32(name, terms):
    """If `name` is a number, terms are scaled by 2^-name, which moves them within their bin."""
    if isinstance(name, int):
        random = torch.Generator().manual_seed(name)
        flats = [torch.randn(NUMEL, generator=random) * 2.0**-name for _ in range(terms)]
    else:
        flats = make_terms(name, terms, terms)
    total, out = make_sum(terms, plan=BucketPlan([0], [NUMEL])), torch.empty(NUMEL)
    deposit_all(total, [[flat] for flat in flats])
    total.round_(out)
    exact = torch.stack(flats).double().sum(0)  # its own error is 2^-29 of float32's
    in_order = torch.zeros(NUMEL)
    for flat in flats:
        in_order += flat
    assert (out.double() - exact).norm() <= (in_order.double() - exact).norm()
