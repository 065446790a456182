"""How exposed sync grows with parameters, accumulation and workers: straight lines through medians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from _peer_results import Measured, first


@dataclass(frozen=True)
class Slope:
    """What grows.

    Attributes:
        title: of the column.
        points: by name, the launches of one point; the first in which a variant took part is taken.
        x: of a launch.
    """

    title: str
    points: dict[str, tuple[str, ...]]
    x: Callable[[Measured], float]


def _parameters(one: Measured) -> float:
    return one.content["about"]["parameters"] / 1e6


def _micro_batches(one: Measured) -> float:
    return one.launch["accumulate"]


def _workers(one: Measured) -> float:
    return one.launch["world"]


_BASE, _GBIT = ("base", "wires"), ("gbit", "gbit-wires")
SLOPES = (
    Slope("ms a million parameters, loopback", {"5m": ("5m",), "17m": _BASE, "26m": ("26m",)}, _parameters),
    Slope(
        "ms a million parameters, 1 Gbit/s",
        {"5m": ("gbit-5m",), "17m": _GBIT, "26m": ("gbit-26m",)},
        _parameters,
    ),
    Slope(
        "ms a micro-batch, loopback",
        {"1": ("every-1",), "4": ("every-4",), "8": _BASE, "16": ("every-16",)},
        _micro_batches,
    ),
    Slope("ms a worker, loopback", {"2": _BASE, "4": ("workers-4",)}, _workers),
    Slope(
        "ms a worker, 1 Gbit/s",
        {"2": _GBIT, "4": ("gbit-workers-4",)},
        _workers,
    ),
)


def line(results: dict[str, Measured], name: str, of: Slope) -> list[tuple[float, float]]:
    """Return what grows and the ms of exposed sync, at every point in which a variant took part."""
    measured = [first(results, name, launches) for launches in of.points.values()]
    return [(of.x(one), one.exposed(name)) for one in measured if one is not None]
