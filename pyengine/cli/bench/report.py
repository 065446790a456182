"""The report of `bench`: a live line while measuring, then tables, and sentences at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.table import Table

from pyengine.cli import report
from pyengine.cli.bench.verdict import spread
from pyengine.cli.bench.windows.measure import Times
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.cli.report import add_numbers


class Report(report.Report):
    def start(self, machine: Mapping[str, Any], parts: Sequence[str]) -> None:
        """Measuring begins; each part is described by a sentence."""
        if self._emit("start", machine=machine, parts=parts):
            self._say(", ".join(f"{name} {value}" for name, value in machine.items()))
            for part in parts:
                self._say(part)

    def begin(self, what: str, total: int) -> None:
        """A part begins, with so many rounds or cases."""
        self._what, self._total = what, total
        # Refreshed between two measurements only: a thread that draws would be measured, too.
        self._progress = self._make_progress(TimeRemainingColumn(), auto_refresh=False, transient=True)
        self._task = self._progress.add_task(what, total=total)
        self._progress.start()

    def advance(self, done: int) -> None:
        """So many rounds or cases are done; without a terminal estimate once how long the others take."""
        if not self._emit("progress", part=self._what, done=done, total=self._total):
            return
        self._progress.update(self._task, completed=done, refresh=True)
        if done == 1:
            self._first = time.perf_counter()
        elif self._progress.disable and done == 2:  # the first one includes the setup
            rest = (self._total - 2) * (time.perf_counter() - self._first)
            self._say(f"about {rest:.0f} s more")

    def end(self) -> None:
        self._progress.stop()

    def kernels(self, roofs: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> None:
        """All kernels are measured; `roofs` are the rates of the memory."""
        is_text = self._emit("roofs", **roofs)
        for row in rows:
            self._emit("kernel", **row)
        if not is_text:
            return
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:.1f}" for name, rate in roofs.items())
        table = _table("kernels", ("median ms", "min ms", "x roof", "x torch"))
        for row in rows:
            numbers = f"{row['p50_ms']:.3f}", f"{row['min_ms']:.3f}"
            ratios = f"{row['times_roof']:.2f}", f"{row['times_torch']:.2f}"
            table.add_row(escape(row["case"]), *numbers, *ratios)
        self._print(table)
        self._say(f"memory, GB/s: {rates}\n")

    def windows(self, case: str, times: Times, rows: Mapping[str, dict[str, Any]]) -> None:
        """All windows are measured: the times of every round, and a row for each variant."""
        table = _table(f"windows, {case}", ("median ms", "min ms", "spread", "sync ms", "sync"))
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
        """Everything is measured; `out` is the result file."""
        if self._emit("conclusion", sentences=sentences, out=out):
            for sentence in sentences:
                self._say(sentence)
            if out is not None:
                self._say(f"wrote {out}")


def _table(first: str, headings: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    add_numbers(table, headings)
    return table
