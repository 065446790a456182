"""What a training run shows: a live line and tables for people, JSON lines for programs,
nothing on other ranks.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from pyengine.cli import output
from pyengine.cli.output import add_numbers
from pyengine.cli.terminal import print_json
from pyengine.cli.train.compare import Row
from pyengine.step.step_record import StepRecord

_LINES = 10  # a run that is not on a terminal prints about this many


class Report:
    """Hears what happens on one rank, and shows nothing: for every rank but the first."""

    def start(self, model: str, unit: str, *, steps: int, about: dict[str, Any]) -> None:
        """Hear that training begins."""

    def step(self, record: StepRecord) -> None:
        """Hear of one optimizer step."""

    def finish(self, quality: dict[str, float]) -> None:
        """Hear that training has ended, and what the model is worth."""

    def compare(self, rows: list[Row]) -> None:
        """Hear how the mode compares with plain DDP, which is the last row."""

    def trace(self, path: Path, *, windows: int) -> None:
        """Hear where a trace has been written."""


class JsonLines(Report):
    """One object a line on stdout; `event` says which."""

    def start(self, model: str, unit: str, *, steps: int, about: dict[str, Any]) -> None:
        """Print the settings."""
        self._print = partial(print_json, model=model)
        self._losses: list[float | None] = []
        self._print("start", unit=unit, steps=steps, **about)

    def step(self, record: StepRecord) -> None:
        """Print the record."""
        self._losses.append(record.loss)
        self._print("step", **asdict(record))

    def finish(self, quality: dict[str, float]) -> None:
        """Print first and last loss and the quality."""
        self._print("trained", first_loss=self._losses[0], last_loss=self._losses[-1], **quality)

    def compare(self, rows: list[Row]) -> None:
        """Print each row."""
        for row in rows:
            self._print("comparison", **asdict(row))

    def trace(self, path: Path, *, windows: int) -> None:
        """Print the path."""
        self._print("trace", path=str(path), windows=windows)


class Tables(output.Tables, Report):
    """A live line while training, a table afterwards."""

    def start(self, model: str, unit: str, *, steps: int, about: dict[str, Any]) -> None:
        """Print a heading and begin the live line."""
        self._model, self._unit, self._steps = model, unit, steps
        self._losses: list[float] = []
        self._sent = 0
        details = ", ".join(f"{name} {_plain(value)}" for name, value in about.items())
        self._console.print(f"[bold]{model}[/bold]: {details}", highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task(model, total=steps, text="")
        self._progress.start()
        self._before = time.perf_counter()

    def step(self, record: StepRecord) -> None:
        """Move the live line; where there is no terminal, print one now and then."""
        now = time.perf_counter()
        rate, self._before = record.count / (now - self._before), now
        self._sent += record.bytes_on_wire
        self._losses.append(record.loss if record.loss is not None else float("nan"))
        text = (
            f"loss {self._losses[-1]:.3f}  {rate:,.0f} {self._unit}/s  "
            f"sync {1e3 * record.exposed_sync_s:.1f} ms  sent {_bytes(self._sent)}"
        )
        self._progress.update(self._task, advance=1, text=text)
        done = len(self._losses)
        if self._progress.disable and (done == self._steps or done % max(1, self._steps // _LINES) == 0):
            self._say(f"step {done}/{self._steps}  {text}")

    def finish(self, quality: dict[str, float]) -> None:
        """End the live line and say what was learnt."""
        self._progress.stop()
        parts = [f"loss {self._losses[0]:.3f} → {self._losses[-1]:.3f}"]
        for name, value in quality.items():
            number = f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.3f}"
            parts.append(f"{_QUALITY[name]} {number}")
        self._console.print("learnt: " + ", ".join(parts) + "\n", highlight=False)

    def compare(self, rows: list[Row]) -> None:
        """Print the table and one sentence on what was saved."""
        table = Table(title=f"{self._model}: the same windows both ways, measured in this run")
        table.add_column("", no_wrap=True)
        add_numbers(table, ("collectives", "sent a rank", "median step", "error", "error, short"))
        for row in rows:
            errors = f"{row.full_window:.1e}", f"{row.short_window:.1e}"
            table.add_row(
                row.label, str(row.collectives), _bytes(row.bytes_sent), _seconds(row.step_s), *errors
            )
        self._console.print(table)
        self._console.print(_LEGEND, style="dim", highlight=False)
        self._console.print(_sentence(rows[0], rows[-1]) + "\n", highlight=False)

    def trace(self, path: Path, *, windows: int) -> None:
        """Print the path."""
        self._say(f"trace of {windows} windows: {path} (open it in Perfetto or chrome://tracing)\n")


_LEGEND = (
    "collectives, sent: counted as one window's gradients are handed to all-reduce; bytes as a ring moves "
    "them. error: how far the window's gradient is from one float64 backward over the whole global batch, "
    "relative; short: a window with fewer micro-batches and unequal counts. plain DDP: mean loss / "
    "accumulate, and an all-reduce in every backward."
)
_QUALITY = {"held_out_loss": "held-out loss", "accuracy": "test accuracy"}


def _sentence(ours: Row, ddp: Row) -> str:
    if ddp.bytes_sent:
        traffic = (
            f"{ddp.bytes_sent / ours.bytes_sent:.1f}x fewer bytes ({_bytes(ours.bytes_sent)} instead of "
            f"{_bytes(ddp.bytes_sent)}) in {ours.collectives} collectives instead of {ddp.collectives}"
        )
    else:
        traffic = "nothing, as one rank has nobody to talk to"
    return (
        f"A window of {ours.label} sent {traffic}; a step took {_seconds(ours.step_s)} instead of "
        f"{_seconds(ddp.step_s)}. In the short window plain DDP's gradient was off by "
        f"{_percent(ddp.short_window)}, {ours.label}'s by {_percent(ours.short_window)}."
    )


def _plain(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _bytes(value: int) -> str:
    return f"{value} B" if value < 1000 else decimal(value)
