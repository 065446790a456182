"""Combinations that are left out show nothing that others do not."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import covering


def _pairs(cases):
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("lengths", [(4, 3, 2), (2, 2, 2, 2), (4, 5, 4), (1, 1, 3)])
def test_every_two_values_meet_in_few_combinations(lengths):
    cases = list(product(*map(range, lengths)))
    chosen = [cases[index] for index in covering(cases)]
    assert _pairs(chosen) == _pairs(cases)
    *_, second, longest = sorted(lengths)
    assert len(chosen) <= 1.5 * longest * second
    assert covering(cases) == covering(cases)


@pytest.mark.parametrize(("lengths", "num"), [((4, 5), 5), ((2, 2), 2), ((1, 6), 6)])
def test_of_two_arguments_each_value_comes(lengths, num):
    cases = list(product(*map(range, lengths)))
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == num
    for axis, length in enumerate(lengths):
        for value in range(length):
            assert any(case[axis] == value for case in chosen)


def test_combinations_that_are_not_there_are_not_missed():
    cases = [(0, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert covering(cases) == {0, 1, 2}
