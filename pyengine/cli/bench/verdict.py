"""Sentences on the results of `bench`, which claim no more than the noise allows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.cli.bench.windows.measure import Times
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.cli.noise import Range

_BUSY = 0.3  # a larger spread means that something else is running
_ENOUGH = 5  # rounds, which agree by chance once in 16
_SLOWER = 0.95  # times faster than torch: a kernel below is reported as slower


@dataclass(frozen=True)
class Ratio:
    """The windows of one variant over those of another one in the same rounds."""

    times: Range
    is_clear: bool  # whether there are enough rounds, and nearly all (all of fewer than ten) agree

    def __str__(self) -> str:
        noise = "" if self.is_clear else ", within noise"
        return f"{self.times.mid:.2f} × as long ({self.times.low:.2f} to {self.times.high:.2f}{noise})"


def ratio(times: Times, variant: str, other: str) -> Ratio:
    """Compare two variants round by round, so that slow drift of the machine cancels."""
    pairs = zip(times[variant], times[other], strict=True)
    ratios = [one["window"] / two["window"] for one, two in pairs]
    odd_ones = min(sum(each < 1 for each in ratios), sum(each > 1 for each in ratios))
    is_clear = len(ratios) >= _ENOUGH and odd_ones <= len(ratios) // 10
    return Ratio(Range.of(ratios), is_clear)


def spread(rounds: Sequence[dict[str, float]]) -> float:
    """Return the spread of the windows of a variant."""
    return Range.of(each["window"] for each in rounds).spread


def on_windows(times: Times) -> list[str]:
    """Name the fastest variant, compare pyengine's fastest one with its peers, and report the noise."""
    medians = {
        name: statistics.median(each["window"] for each in rounds)
        for name, rounds in times.items()
        if VARIANTS[name].is_synced
    }
    if not medians:
        return []
    ranking = sorted(medians, key=medians.__getitem__)
    ours = next((name for name in ranking if VARIANTS[name].is_ours), None)
    peers = [name for name in ranking if not VARIANTS[name].is_ours]
    found = []
    if len(ranking) > 1:
        first, *others = ranking
        near = [VARIANTS[name].label for name in others if not ratio(times, name, first).is_clear]
        rest = (
            f"within noise of it: {'; '.join(near)}" if near else f"clearly, over {len(times[first])} rounds"
        )
        found.append(
            f"{VARIANTS[first].label} had the shortest windows, {1e3 * medians[first]:.0f} ms in the median; "
            f"{rest}."
        )
    if ours is not None and peers:
        against = "; ".join(f"{VARIANTS[peer].label} {ratio(times, peer, ours)}" for peer in peers)
        found.append(f"Against {VARIANTS[ours].label} in the same rounds a window took: {against}.")
    typical = statistics.median(spread(rounds) for rounds in times.values())
    if typical > _BUSY:
        found.append(
            f"Windows of one variant differ by {typical:.0%} between rounds, so something else was running: "
            "small differences mean nothing. Use more --rounds, or an idle machine."
        )
    return found


def on_kernels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the kernels with the memory's rate and with torch, and report the noise."""
    roof, torchs = (statistics.median(row[name] for row in rows) for name in ("times_roof", "times_torch"))
    noise = statistics.median(row["p50_ms"] / row["min_ms"] for row in rows)
    slower = [row["case"] for row in rows if row["times_torch"] < _SLOWER]
    return [
        (
            f"Kernels: over {len(rows)} cases the median is {roof:.2f} × the roof and {torchs:.1f} × as fast "
            "as torch."
        ),
        f"Slower than torch: {'; '.join(slower) if slower else 'none'}.",
        f"Noise: a median call took {noise:.2f} × the best one.",
    ]
