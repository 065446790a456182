"""Two laws of speed-up, fitted by least squares: one number, the share of the work that does not divide.

G. M. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities",
AFIPS 1967: the whole work is fixed, and a share s of it is serial, so the time on w workers is s + (1 - s) /
w of one worker's.

J. L. Gustafson, "Reevaluating Amdahl's law", CACM 31(5), 1988: the work of each worker is fixed, and a share
s of its time does not grow with the whole, so w workers do s + (1 - s) w of one worker's work in the same
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[int, float]  # workers, speed-up


@dataclass(frozen=True)
class Amdahl:
    """1 / S(w) = s + (1 - s) / w.

    Attributes:
        serial: s, 0 to 1.
        points: how many worker counts above 1 it was fitted to.
        verb: what that share does not do.
    """

    serial: float
    points: int
    name = "Amdahl"
    verb = "divide"

    def speed_up(self, workers: float) -> float:
        """Return the speed-up the law gives."""
        return 1 / (self.serial + (1 - self.serial) / workers)

    @property
    def limit(self) -> float:
        """The speed-up that no number of workers exceeds."""
        return 1 / self.serial if self.serial else math.inf


@dataclass(frozen=True)
class Gustafson:
    """S(w) = s + (1 - s) w; attributes as of `Amdahl`."""

    serial: float
    points: int
    name = "Gustafson"
    verb = "scale"

    def speed_up(self, workers: float) -> float:
        """Return the scaled speed-up the law gives."""
        return self.serial + (1 - self.serial) * workers

    @property
    def limit(self) -> float:
        """There is none."""
        return math.inf


Law = Amdahl | Gustafson


def fit_amdahl(points: Sequence[Point]) -> Amdahl | None:
    """Fit 1 / S - 1 / w = s (1 - 1 / w); None without a point above one worker,
    or if they are slower than one.
    """
    pairs = [(1 - 1 / workers, 1 / speed_up - 1 / workers) for workers, speed_up in points if workers > 1]
    serial = _slope(pairs)
    return None if serial is None else Amdahl(serial, len(pairs))


def fit_gustafson(points: Sequence[Point]) -> Gustafson | None:
    """Fit w - S = s (w - 1); None without a point above one worker, or if they are slower than one."""
    pairs = [(workers - 1.0, workers - speed_up) for workers, speed_up in points if workers > 1]
    serial = _slope(pairs)
    return None if serial is None else Gustafson(serial, len(pairs))


def _slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return s of y = s x with the least squares; 0 for what is better than linear, None above 1,
    which is no share.
    """
    if not pairs:
        return None
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    return None if slope > 1 else max(0.0, slope)
