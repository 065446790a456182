"""Sums of scalars by lanes: exact, and the same in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyengine.window.exact_scalars import NUM_LANES, ROUNDED_LANE, lanes, lanes_of, rounded, total

FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)


def _sum(values: list[float]) -> float:
    return total(lanes(torch.tensor(values, dtype=torch.float64)).tolist())


@given(FLOATS)
def test_float32_numbers_are_summed_exactly_and_rounded_once(values):
    assert _sum(values) == float(sum(map(Fraction, values)))


@given(st.lists(st.floats(width=32), max_size=40))
def test_the_host_makes_the_same_lanes_as_a_device(values):
    found = lanes_of(values)
    if all(map(math.isfinite, values)):
        assert found == lanes(torch.tensor(values, dtype=torch.float64)).tolist()
    else:
        assert str(total(found)) == str(_sum(values))


@given(FLOATS, st.randoms(use_true_random=False), st.integers(0, 40))
def test_neither_order_nor_grouping_matters(values, random, cut):
    shuffled = random.sample(values, len(values))
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    merged = sum(lanes(torch.tensor(part, dtype=torch.float64)) for part in parts)
    assert total(merged.tolist()) == _sum(values)


@pytest.mark.parametrize("count", [1, 8192])
@pytest.mark.parametrize("value", [1.0, -3.4028234663852886e38, 1.401298464324817e-45, 0.1])
def test_up_to_8192_values_add_without_rounding(value, count):
    exact = float(torch.tensor(value, dtype=torch.float32))
    assert _sum([exact] * count) == float(Fraction(exact) * count)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1.0, math.inf], "inf"),
        ([1.0, -math.inf], "-inf"),
        ([1.0, math.nan], "nan"),
        ([math.inf, -math.inf], "nan"),
    ],
)
def test_what_is_not_finite_stays_visible(values, want):
    assert str(_sum(values)) == want


@pytest.mark.parametrize("value", [0.0, -3.25, 1e30, float("inf"), float("-inf")])
def test_a_rounded_sum_comes_back_as_it_was(value):
    found = [0.0] * NUM_LANES
    found[ROUNDED_LANE] = rounded(torch.tensor(value, dtype=torch.float64)).item()
    assert total(found) == value
