"""Amdahl's and Gustafson's laws: a known share is found again, and what they cannot say is not said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from pyengine.cli.study.laws import Amdahl, Gustafson, Law, fit_amdahl, fit_gustafson

BOTH = pytest.mark.parametrize(
    ("law", "fit"), [(Amdahl, fit_amdahl), (Gustafson, fit_gustafson)], ids=["amdahl", "gustafson"]
)


@BOTH
@pytest.mark.parametrize("serial", [0.0, 0.125, 0.5, 1.0])
def test_known_share_is_found_again(law: type[Law], fit: Callable, serial: float) -> None:
    points = [(workers, law(serial, 0).speed_up(workers)) for workers in (1, 2, 4, 8)]
    found = fit(points)
    assert found.serial == pytest.approx(serial, abs=1e-12)  # a few roundings of fp64
    assert found.points == 3


def test_amdahl_s_speed_up_is_one_over_the_time() -> None:
    law = Amdahl(0.5, 1)
    assert (law.speed_up(1), law.speed_up(2), law.limit) == (1.0, 1 / 0.75, 2.0)


def test_gustafson_s_speed_up_grows_without_limit() -> None:
    law = Gustafson(0.5, 1)
    assert (law.speed_up(1), law.speed_up(3), law.limit) == (1.0, 2.0, math.inf)


def test_share_is_fitted_by_least_squares() -> None:
    # x = 1/2, 3/4; y = 1/1 - 1/2, 1/2 - 1/4: s = (1/4 + 3/16) / (1/4 + 9/16) = 7/13
    found = fit_amdahl([(2, 1.0), (4, 2.0)])
    assert found is not None
    assert found.serial == pytest.approx(7 / 13, abs=1e-12)


@BOTH
def test_better_than_linear_divides_all(law: type[Law], fit: Callable) -> None:
    assert fit([(1, 1.0), (2, 2.5)]) == law(0.0, 1)


@BOTH
@pytest.mark.parametrize(
    "points", [[], [(1, 1.0)], [(1, 1.0), (2, 0.5)]], ids=["none", "one worker", "slower"]
)
def test_no_law_where_there_is_none(law: type[Law], fit: Callable, points: list[tuple[int, float]]) -> None:
    assert fit(points) is None


def test_law_that_divides_all_has_no_limit() -> None:
    assert Amdahl(0.0, 1).limit == math.inf
