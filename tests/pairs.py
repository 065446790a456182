"""Which combinations of a test's arguments run by default, where it takes ranks: as few as show each value in
company.

What breaks, breaks with one value or with two that meet, seldom with three (Kuhn, Wallace, Gallo 2004). So
of three arguments or more every two values meet in some combination, and of two every value comes once.
`make faults` runs all combinations. Of what is left, a test that is given the number of ranks runs on three
by default, the least that is neither a pair nor a power of two; `make test-slow` runs it on the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

_MANY = 3  # axes of which pairs are wanted
_WORLD = 3  # ranks; of a test without, the nearest that it has


def covering(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Choose cases, the same ones every time.

    Args:
        cases: by case, its value on every axis.

    Returns:
        Their places.
    """
    shown = [_shown(case) for case in cases]
    missing = {what for case in shown for what in case}
    left, used = list(range(len(cases))), Counter[Hashable]()

    def worth(index: int) -> tuple[int, int, int]:
        """Of those that show most, the one whose values have come least."""
        news = len(missing.intersection(shown[index]))
        return news, -sum(used[value] for value in enumerate(cases[index])), -index

    while missing:
        best = max(left, key=worth)
        left.remove(best)
        missing.difference_update(shown[best])
        used.update(enumerate(cases[best]))
    return set(range(len(cases))) - set(left)


def _shown(case: Sequence[Hashable]) -> list[Hashable]:
    """Return what a case shows: pairs of values, or values."""
    values = list(enumerate(case))
    return list(combinations(values, 2)) if len(case) >= _MANY else list(values)


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Where a test costs a world of processes, mark as exhaustive what others of it show, too, and as slow
    the other worlds.
    """
    tests: dict[tuple[str, bool], list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_costly = isinstance(item, pytest.Function) and "ranks" in item.fixturenames
        if is_costly and not item.get_closest_marker("exhaustive"):
            is_slow = item.get_closest_marker("slow") is not None
            tests[item.nodeid.partition("[")[0], is_slow].append(item)
    for same in tests.values():
        cases = [_values(item) for item in same]
        chosen = covering(cases) if len(cases[0]) >= 2 else range(len(same))
        for index, item in enumerate(same):
            if index not in chosen:
                item.add_marker(pytest.mark.exhaustive)
        left = [same[index] for index in sorted(chosen)]
        for index in later([_world(item) for item in left]):
            left[index].add_marker(pytest.mark.slow)


def later(worlds: Sequence[int | None]) -> set[int]:
    """Choose what waits for `make test-slow`.

    Args:
        worlds: by case of one test, the number of ranks that it is given, if it is.

    Returns:
        Their places.
    """
    known = [world for world in worlds if world is not None]
    usual = min(known, key=lambda world: (abs(world - _WORLD), world), default=None)
    return {index for index, world in enumerate(worlds) if world not in (None, usual)}


def _world(item: pytest.Function) -> int | None:
    """Return the number of ranks that a test is given."""
    world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
    return world if isinstance(world, int) else None


def _values(item: pytest.Function) -> list[Hashable]:
    """Return a value an axis: arguments that are given together are one."""
    if not hasattr(item, "callspec"):
        return []
    params = dict(item.callspec.params)
    axes: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axes.append(tuple(id(params.pop(name)) for name in names))  # the same object in every combination
    return [*axes, *map(id, params.values())]
