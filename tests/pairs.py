"""Which combinations of a test's arguments run by default: pairwise testing.

Most faults need one value or a pair of values, few need three (Kuhn, Wallace, Gallo 2004). With three
arguments or more, every pair of values occurs in some combination. With two arguments, every value occurs
once if the test runs on ranks, which is expensive; otherwise all combinations run. `make faults` runs all
combinations of every test.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

_MANY = 3  # number of axes from which pairs are covered, not single values


def covering(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Choose cases that cover every pair of values, the same cases every time.

    Args:
        cases: the values of each case, one per axis.

    Returns:
        The indices of the chosen cases.
    """
    shown = [_shown(case) for case in cases]
    missing = {what for case in shown for what in case}
    chosen, used = set(), Counter[Hashable]()

    def cost(index: int) -> tuple[int, int, int]:
        """Prefer the case with most missing pairs, then the one whose values were used least."""
        news = len(missing.intersection(shown[index]))
        return -news, sum(used[value] for value in enumerate(cases[index])), index

    heap = [cost(index) for index in range(len(cases))]
    heapq.heapify(heap)
    while missing:
        *_, best = heapq.heappop(heap)
        now = cost(best)
        if heap and now > heap[0]:  # costs only grow: the heap has lower bounds of the others
            heapq.heappush(heap, now)
            continue
        chosen.add(best)
        missing.difference_update(shown[best])
        used.update(enumerate(cases[best]))
    return chosen


def _shown(case: Sequence[Hashable]) -> list[Hashable]:
    """Return the pairs of values of a case; with two arguments, its values."""
    values = list(enumerate(case))
    return list(combinations(values, 2)) if len(case) >= _MANY else list(values)


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Mark combinations as exhaustive if other combinations of the test cover their pairs of values."""
    tests: dict[tuple[str, bool], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("exhaustive"):
            is_slow = item.get_closest_marker("slow") is not None
            tests[item.nodeid.partition("[")[0], is_slow].append(item)
    for same in tests.values():
        cases = [_values(item) for item in same]
        if len(cases[0]) < (2 if "ranks" in same[0].fixturenames else _MANY):
            continue
        chosen = covering(cases)
        for index, item in enumerate(same):
            if index not in chosen:
                item.add_marker(pytest.mark.exhaustive)


def _values(item: pytest.Function) -> list[Hashable]:
    """Return one value for each axis; arguments parametrized together are one axis."""
    if not hasattr(item, "callspec"):
        return []
    params = dict(item.callspec.params)
    axes: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axes.append(tuple(id(params.pop(name)) for name in names))  # the same object in every combination
    return [*axes, *map(id, params.values())]
