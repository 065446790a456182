"""tests/pairs.py keeps every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import covering


def _pairs(cases):
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("lengths", [(4, 3, 2), (2, 2, 2, 2)])
def test_every_two_values_meet_in_few_combinations(lengths):
    cases = list(product(*map(range, lengths)))
    chosen = [cases[index] for index in covering(cases)]
    assert _pairs(chosen) == _pairs(cases)
    *_, second, longest = sorted(lengths)
    assert len(chosen) <= 1.5 * longest * second


@pytest.mark.parametrize(("lengths", "num"), [((4, 5), 5), ((1, 6), 6)])
def test_each_value_of_two_arguments_is_chosen(lengths, num):
    cases = list(product(*map(range, lengths)))
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == num
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(range(length)) for length in lengths]
