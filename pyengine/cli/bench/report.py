"""The report of `bench`: a live line during the measurement, then tables and sentences.

The sentences report only differences that are larger than the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.table import Table

from pyengine.cli import report
from pyengine.cli.bench.measure import Times
from pyengine.cli.bench.variants import VARIANTS
from pyengine.cli.noise import Range
from pyengine.cli.report import add_numbers

_BUSY = 0.3  # A larger spread means that another program is running.
_ENOUGH = 5  # Minimum number of rounds for a clear result; five agree by chance in 1 of 16 cases.


class BenchReport(report.Report):
    def start(self, machine: Mapping[str, Any], cases: Sequence[str]) -> None:
        """Report the machine and the cases; each entry of `cases` is a sentence."""
        if self._emit("start", machine=machine, cases=cases):
            self._say(", ".join(f"{name} {value}" for name, value in machine.items()))
            for case in cases:
                self._say(case)

    def begin(self, what: str, total: int) -> None:
        """Start the live line of a case with `total` rounds."""
        self._what, self._total = what, total
        # Refresh the line only between measurements, because a refreshing thread would be measured, too.
        self._progress = self._make_progress(TimeRemainingColumn(), auto_refresh=False, transient=True)
        self._task = self._progress.add_task(what, total=total)
        self._progress.start()

    def advance(self, done: int) -> None:
        """Report `done` rounds; without a terminal, estimate the remaining time once."""
        if not self._emit("progress", case=self._what, done=done, total=self._total):
            return
        self._progress.update(self._task, completed=done, refresh=True)
        if done == 1:
            self._first = time.perf_counter()
        elif self._progress.disable and done == 2:  # the first round includes the setup
            rest = (self._total - 2) * (time.perf_counter() - self._first)
            self._say(f"about {rest:.0f} s more")

    def end(self) -> None:
        self._progress.stop()

    def windows(self, case: str, times: Times, rows: Mapping[str, dict[str, Any]]) -> None:
        """Report all windows: the times of every round, and a table row for each variant."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(f"windows, {case}")
        add_numbers(table, ("median ms", "min ms", "spread", "sync ms", "sync"))
        for name, row in rows.items():
            windows = [1e3 * each["window"] for each in times.get(name, [])]
            self._emit("variant", case=case, variant=name, windows_ms=windows, **row)
            if "failed" in row:
                table.add_row(escape(VARIANTS[name].label), "failed")
                continue
            median, sync = row["window_p50_ms"], row.get("sync_p50_ms")
            cells = ["–", "–"] if sync is None else [f"{sync:.1f}", f"{sync / median:.0%}"]
            numbers = f"{median:.1f}", f"{row['window_min_ms']:.1f}", f"{spread(times[name]):.0%}"
            table.add_row(escape(VARIANTS[name].label), *numbers, *cells)
        self._print(table)

    def conclude(self, sentences: Sequence[str], out: str | None) -> None:
        """Report the conclusions; `out` is the result file."""
        if self._emit("conclusion", sentences=sentences, out=out):
            for sentence in sentences:
                self._say(sentence)
            if out is not None:
                self._say(f"wrote {out}")


# ---- sentences about the results ----


@dataclass(frozen=True)
class Ratio:
    """The ratio of the window times of two variants in the same rounds."""

    times: Range
    is_clear: bool  # whether there are enough rounds, and at least 90 % of them agree

    def __str__(self) -> str:
        noise = "" if self.is_clear else ", within noise"
        return f"{self.times.mid:.2f} × as long ({self.times.low:.2f} to {self.times.high:.2f}{noise})"


def ratio(times: Times, variant: str, other: str) -> Ratio:
    """Compare two variants round by round, so that slow drift of the machine cancels out."""
    pairs = zip(times[variant], times[other], strict=True)
    ratios = [one["window"] / two["window"] for one, two in pairs]
    odd_ones = min(sum(each < 1 for each in ratios), sum(each > 1 for each in ratios))
    is_clear = len(ratios) >= _ENOUGH and odd_ones <= len(ratios) // 10
    return Ratio(Range.of(ratios), is_clear)


def spread(rounds: Sequence[dict[str, float]]) -> float:
    """Return the spread of a variant's window times."""
    return Range.of(each["window"] for each in rounds).spread


def on_windows(times: Times) -> list[str]:
    """Name the fastest variant, compare pyengine with other libraries, and report the noise."""
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
            f"within noise of it: {'; '.join(near)}"
            if near
            else f"a clear lead over {len(times[first])} rounds"
        )
        found.append(
            f"{VARIANTS[first].label} had the shortest windows, with a median of {1e3 * medians[first]:.0f} "
            f"ms; {rest}."
        )
    if ours is not None and peers:
        against = "; ".join(f"{VARIANTS[peer].label} {ratio(times, peer, ours)}" for peer in peers)
        found.append(f"Compared with {VARIANTS[ours].label} in the same rounds, a window took: {against}.")
    typical = statistics.median(spread(rounds) for rounds in times.values())
    if typical > _BUSY:
        found.append(
            f"Windows of one variant differ by {typical:.0%} between rounds, so something else was running: "
            "small differences mean nothing. Use more --rounds, or an idle machine."
        )
    return found
