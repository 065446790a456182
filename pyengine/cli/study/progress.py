"""What a study shows while it runs and when it is done: a live line and tables for people,
JSON lines for programs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from pyengine.cli import output
from pyengine.cli.output import add_numbers
from pyengine.cli.study.analysis import Analysis, Figures, Range, duration, percent, recommend
from pyengine.cli.study.grid import Cell
from pyengine.cli.study.store import Record
from pyengine.cli.terminal import print_json


class Display:
    """Hears what happens, and shows nothing of it."""

    def live(self) -> AbstractContextManager[object]:
        """Show what goes on, as long as the context is open."""
        return nullcontext()

    def plan(self, *, runs: int, kept: int, impossible: dict[Cell, str]) -> None:
        """Hear how many runs are to be made, how many are there already, and which cells cannot be."""

    def begin(self, cell: Cell, repeat: int) -> None:
        """Hear that a run begins."""

    def step(self, done: int, steps: int, accuracy: float | None) -> None:
        """Hear how far it is."""

    def ran(self, record: Record) -> None:
        """Hear that it has ended."""

    def conclude(self, analysis: Analysis, page: Path) -> None:
        """Hear the figures, and where the report is."""


class JsonLines(Display):
    """One object a line on stdout; `event` says which."""

    def plan(self, *, runs: int, kept: int, impossible: dict[Cell, str]) -> None:
        """Print it."""
        print_json("plan", runs=runs, kept=kept)
        for cell, reason in impossible.items():
            print_json("impossible", **asdict(cell), reason=reason)

    def ran(self, record: Record) -> None:
        """Print the run without its steps, which are in runs.jsonl."""
        names = ("workers", "batch", "repeat", "status", "reason", "steps", "wall_s")
        print_json("run", **{name: getattr(record, name) for name in names})

    def conclude(self, analysis: Analysis, page: Path) -> None:
        """Print the cells and the recommendation."""
        for cell, figures in analysis.cells.items():
            values = asdict(figures)
            del values["cell"]
            print_json("cell", **asdict(cell), **values)
        found = recommend(analysis)
        print_json("recommendation", best=found.best and asdict(found.best), text=found.text)
        print_json("report", goal=analysis.goal, stalls=len(analysis.stalls), page=str(page))


class Tables(output.Tables, Display):
    """A live line while runs go on, a line for each that has ended, then a table and a recommendation."""

    def __init__(self) -> None:
        super().__init__()
        columns = (
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        # Twice a second: the workers being measured may need every core.
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, refresh_per_second=2
        )
        self._task = self._progress.add_task("", total=None, text="")
        self._run = ""

    def live(self) -> AbstractContextManager[object]:
        """Show a line that moves."""
        return self._progress

    def plan(self, *, runs: int, kept: int, impossible: dict[Cell, str]) -> None:
        """Print it."""
        self._progress.update(self._task, total=runs + kept, completed=kept)
        there = f", {kept} of them are there already" if kept else ""
        self._say(f"{runs + kept} runs{there}")
        for cell, reason in impossible.items():
            self._say(f"left out: {cell}: {reason}")

    def begin(self, cell: Cell, repeat: int) -> None:
        """Show the run."""
        self._run = f"{cell}, repeat {repeat + 1}"
        self._progress.update(self._task, text=f"{self._run}: starting")

    def step(self, done: int, steps: int, accuracy: float | None) -> None:
        """Move the line."""
        right = f", accuracy {percent(accuracy)}" if accuracy is not None and math.isfinite(accuracy) else ""
        self._progress.update(self._task, text=f"{self._run}: step {done}/{steps}{right}")

    def ran(self, record: Record) -> None:
        """Print a line."""
        self._progress.update(self._task, advance=1)
        how = f"done in {duration(record.wall_s)}" if record.is_done else f"{record.status}: {record.reason}"
        self._say(f"{record.cell}, repeat {record.repeat + 1}: {how}")

    def conclude(self, analysis: Analysis, page: Path) -> None:
        """Print the table and the recommendation."""
        if analysis.cells:
            self._console.print(_table(analysis))
        self._say(recommend(analysis).text)
        self._say(f"\nreport: {page}")


# The first ones fit into 80 columns; the report shows all.
HEADINGS = ("workers", "batch", "samples/s", "speed-up", "efficiency", "waits", "to goal", "best")
MORE_HEADINGS = ("batches/s", "memory", "cores")


def row(figures: Figures) -> tuple[str, ...]:
    """Return a cell's figures as text, in the order of HEADINGS and MORE_HEADINGS; medians of its repeats."""
    return (
        f"{figures.cell.workers}{' *' if figures.is_oversubscribed else ''}",
        str(figures.cell.batch),
        f"{figures.samples_s.mid:,.0f}",
        _text(figures.speed_up, lambda value: f"{value:.2f}x"),
        _text(figures.efficiency, percent),
        percent(figures.sync_share.mid),
        _text(figures.goal_s, duration),
        _text(figures.accuracy, percent),
        f"{figures.batches_s.mid:,.1f}",
        f"{figures.memory_bytes.mid / 2**20:,.0f} MiB",
        f"{figures.cpu_share.mid:.2f}",
    )


def _text(figure: Range | None, form: Any) -> str:
    return "–" if figure is None else form(figure.mid)


def _left_out(analysis: Analysis) -> list[str]:
    counts = {"stalls left out": len(analysis.stalls), "runs that did not end well": len(analysis.ended)}
    return [f"{what}: {count}" for what, count in counts.items() if count]


def _table(analysis: Analysis) -> Table:
    shared = any(figures.is_oversubscribed for figures in analysis.cells.values())
    goal = f"goal: {percent(analysis.goal)}" if analysis.goal is not None else ""
    notes = "; ".join(
        note for note in (goal, "* workers that share cores" * shared, *_left_out(analysis)) if note
    )
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, caption=notes or None, caption_justify="left"
    )
    add_numbers(table, HEADINGS)
    for figures in analysis.cells.values():
        table.add_row(*row(figures)[: len(HEADINGS)])
    return table
