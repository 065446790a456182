"""What a benchmark shows: a live line and tables for people, JSON lines for programs,
nothing on other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pyengine.cli import output
from pyengine.cli.bench.verdict import spread
from pyengine.cli.bench.windows.measure import Times
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.cli.output import add_numbers
from pyengine.cli.terminal import print_json


class Report:
    """Hears what happens, and shows nothing of it."""

    def start(self, machine: Mapping[str, Any], parts: Sequence[str]) -> None:
        """Hear what is to be measured, a sentence a part."""

    def begin(self, what: str, total: int) -> None:
        """Hear that a part begins, and how many rounds or cases it has."""

    def advance(self, done: int) -> None:
        """Hear how many are done."""

    def end(self) -> None:
        """Hear that the part has ended."""

    def kernels(self, roofs: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> None:
        """Hear what the memory allows, and the kernels' rows."""

    def windows(self, case: str, times: Times, rows: Mapping[str, dict[str, Any]]) -> None:
        """Hear the times of every round, and the variants' rows."""

    def conclude(self, sentences: Sequence[str], out: str | None) -> None:
        """Hear what was seen, and where the result file is."""


class JsonLines(Report):
    """One object a line on stdout; `event` says which."""

    def start(self, machine: Mapping[str, Any], parts: Sequence[str]) -> None:
        """Print it."""
        print_json("start", machine=machine, parts=parts)

    def begin(self, what: str, total: int) -> None:
        """Keep it for the lines to come."""
        self._what, self._total = what, total

    def advance(self, done: int) -> None:
        """Print it."""
        print_json("progress", part=self._what, done=done, total=self._total)

    def kernels(self, roofs: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> None:
        """Print each."""
        print_json("roofs", **roofs)
        for row in rows:
            print_json("kernel", **row)

    def windows(self, case: str, times: Times, rows: Mapping[str, dict[str, Any]]) -> None:
        """Print each variant with its windows, in order; none of one that failed."""
        for name, row in rows.items():
            windows = [1e3 * each["window"] for each in times.get(name, [])]
            print_json("variant", case=case, variant=name, windows_ms=windows, **row)

    def conclude(self, sentences: Sequence[str], out: str | None) -> None:
        """Print it."""
        print_json("conclusion", sentences=sentences, out=out)


class Tables(output.Tables, Report):
    """A live line while something is measured, then a table, and plain words at the end."""

    def start(self, machine: Mapping[str, Any], parts: Sequence[str]) -> None:
        """Print it."""
        self._say(", ".join(f"{name} {value}" for name, value in machine.items()))
        for part in parts:
            self._say(part)

    def begin(self, what: str, total: int) -> None:
        """Begin the live line."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        # Moves between two measurements only: a thread that draws would be measured too.
        self._progress = Progress(
            *columns,
            console=self._console,
            disable=not self._console.is_terminal,
            auto_refresh=False,
            transient=True,
        )
        self._task, self._total = self._progress.add_task(what, total=total), total
        self._progress.start()

    def advance(self, done: int) -> None:
        """Move the live line; where there is no terminal, say once how long it will take."""
        self._progress.update(self._task, completed=done, refresh=True)
        if done == 1:
            self._first = time.perf_counter()
        elif self._progress.disable and done == 2:  # the first one began with setting up
            rest = (self._total - 2) * (time.perf_counter() - self._first)
            self._say(f"about {rest:.0f} s more")

    def end(self) -> None:
        """End the live line."""
        self._progress.stop()

    def kernels(self, roofs: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> None:
        """Print the table."""
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:.1f}" for name, rate in roofs.items())
        table = _table("kernels", ("median ms", "min ms", "x roof", "x torch"))
        for row in rows:
            numbers = f"{row['p50_ms']:.3f}", f"{row['min_ms']:.3f}"
            ratios = f"{row['times_roof']:.2f}", f"{row['times_torch']:.2f}"
            table.add_row(escape(row["case"]), *numbers, *ratios)
        self._console.print(table)
        self._say(f"memory: {rates}\n")

    def windows(self, case: str, times: Times, rows: Mapping[str, dict[str, Any]]) -> None:
        """Print the table."""
        table = _table(f"windows, {case}", ("median ms", "min ms", "spread", "sync ms", "sync"))
        for name, row in rows.items():
            if "failed" in row:
                table.add_row(escape(VARIANTS[name].label), "failed")
                continue
            median, sync = row["window_p50_ms"], row.get("sync_p50_ms")
            cells = ["–", "–"] if sync is None else [f"{sync:.1f}", f"{sync / median:.0%}"]
            numbers = f"{median:.1f}", f"{row['window_min_ms']:.1f}", f"{spread(times[name]):.0%}"
            table.add_row(escape(VARIANTS[name].label), *numbers, *cells)
        self._console.print(table)

    def conclude(self, sentences: Sequence[str], out: str | None) -> None:
        """Print it."""
        for sentence in sentences:
            self._say(sentence)
        if out is not None:
            self._say(f"wrote {out}")


def _table(first: str, headings: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    add_numbers(table, headings)
    return table
