"""The result files of `bench_peers.py` and their figures; imports neither torch nor the peers."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from _launches import LAUNCHES

CONTROL = ("no_sync_view", "no_sync_view_again")
_VARIANTS = {name for launch in LAUNCHES for name in launch.variants}
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-peers-(.+)\.json")


@dataclass(frozen=True)
class Measured:
    """The result file of one launch."""

    path: Path
    content: dict[str, Any]

    @property
    def launch(self) -> dict[str, Any]:
        return self.content["launch"]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Figures by variant, without variants that `bench_peers.py` no longer measures."""
        return {name: row for name, row in self.content["rows"].items() if name in _VARIANTS}

    @property
    def date(self) -> str:
        return self.path.name[:10]

    def label(self, name: str) -> str:
        """Return the name of a variant in tables."""
        return self.content["variants"][name]["label"]

    def is_ours(self, name: str) -> bool:
        return self.content["variants"][name]["is_ours"]

    def median(self, name: str) -> float:
        """Return the median time of a window in ms."""
        return statistics.median(self.rows[name]["times"]["window"])

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the ratio of two variants' window times in each round, so that slow drift cancels out."""
        mine, theirs = self.rows[name]["times"]["window"], self.rows[other]["times"]["window"]
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    def ratio(self, name: str, other: str) -> float:
        return statistics.median(self.ratios(name, other))

    def exposed(self, name: str) -> float:
        """Return the median time in ms, over all rounds, by which forward, backward and sync exceed `floor`.

        If a variant does not time its epilogue separately, whole windows are compared.
        """
        phase = "sync" if "epilogue" in self.rows[name]["times"] else "window"
        return statistics.median(self._over_floor(name, phase))

    def _over_floor(self, name: str, phase: str) -> list[float]:
        mine, floor = self.rows[name]["times"][phase], self.rows["floor"]["times"][phase]
        return [own - base for own, base in zip(mine, floor, strict=True)]

    @cached_property
    def noise(self) -> float:
        """Threshold for a difference: how far windows with the same work differ, but at least 2 %."""
        found = self.ratios(*reversed(CONTROL))
        return max(0.02, abs(statistics.median(found) - 1), doubt(found))


def half_range(values: Sequence[float]) -> float:
    """Return half of the interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def doubt(values: Sequence[float]) -> float:
    """Return how far a median may be off by chance: about two standard errors for normal values."""
    return 3.7 * half_range(values) / len(values) ** 0.5  # 2 * 1.25 * half_range / 0.6745


def newest(folder: Path) -> dict[str, Measured]:
    """Return the newest file of every launch, by the launch's name."""
    found = {}
    for path in sorted(folder.glob("*-peers-*.json")):
        match = _NAME.fullmatch(path.name)
        if match:
            found[match[2]] = path
    return {name: Measured(path, json.loads(path.read_text())) for name, path in found.items()}


def first(results: dict[str, Measured], name: str, launches: Sequence[str]) -> Measured | None:
    """Return the first of the launches that measured a variant, or None if no launch did."""
    for launch in launches:
        if launch in results and name in results[launch].rows:
            return results[launch]
    return None
