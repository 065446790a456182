"""Ranges of repeated measurements, which count as different only if the ranges do not overlap."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The median, smallest and largest value of repeated measurements."""

    mid: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """Return the range of one or more values."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread(self) -> float:
        """The difference between the largest and the smallest value, divided by the median."""
        return (self.high - self.low) / self.mid

    def over(self, divisor: float) -> Range:
        return Range(self.mid / divisor, self.low / divisor, self.high / divisor)

    def overlaps(self, other: Range) -> bool:
        """Return whether the ranges overlap, so that their difference is within noise."""
        return self.low <= other.high and other.low <= self.high


def percent(share: float) -> str:
    """Format a share as a percentage, with a non-breaking space."""
    return f"{100 * share:.1f}\u00a0%" if share < 1 else f"{100 * share:.0f}\u00a0%"


def duration(value: float) -> str:
    """Format seconds with a suitable unit."""
    if value >= 3600:
        return f"{value / 3600:.1f}\u00a0h"
    if value >= 60:
        return f"{value / 60:.1f}\u00a0min"
    # A value just below one second would be formatted as 1e+03 ms.
    return f"{value:.2f}\u00a0s" if value >= 0.9995 else f"{1e3 * value:.3g}\u00a0ms"
