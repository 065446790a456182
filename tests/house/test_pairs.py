"""tests/pairs.py keeps every pair of values; with two arguments, every value."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import covering


@pytest.mark.parametrize(("lengths", "num"), [((4, 3, 2), 12), ((2, 2, 2, 2), 6), ((4, 5), 5), ((1, 6), 6)])
def test_few_combinations_have_every_pair_or_value_of_all(lengths, num):
    cases = list(product(*map(range, lengths)))
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) <= num
    together = 2 if len(lengths) > 2 else 1
    shown, wanted = (
        {some for case in each for some in combinations(enumerate(case), together)}
        for each in (chosen, cases)
    )
    assert shown == wanted
