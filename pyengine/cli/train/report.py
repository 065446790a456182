"""The report of `train`: a live line during training, and a table afterwards."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from pyengine.cli import report
from pyengine.cli.gradient_measures import with_spread
from pyengine.cli.noise import duration
from pyengine.cli.report import add_numbers
from pyengine.cli.train.compare import Row
from pyengine.step.step_record import StepRecord

_LINES = 10  # approximate number of lines that a run prints if stdout is not a terminal


class TrainReport(report.Report):
    def start(self, model: str, unit: str, *, done: int, steps: int, about: dict[str, Any]) -> None:
        """Report the start of training; `done` steps were taken before the checkpoint."""
        self._model, self._unit, self._resumed, self._steps = model, unit, done, steps
        self._losses: list[float | None] = []
        self._sent = 0
        self._begin = self._before = time.perf_counter()
        self._progress = self._make_progress(TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        if self._emit("start", model=model, unit=unit, steps=steps, **about):
            details = ", ".join(
                f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
                for name, value in about.items()
            )
            self._console.print(f"[bold]{model}[/bold]: {details}", highlight=False)
            self._task = self._progress.add_task(model, completed=done, total=steps, text="")
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        self._losses.append(record.loss)
        if not self._emit("step", model=self._model, **asdict(record)):
            return
        now = time.perf_counter()
        rate, self._before = record.count / (now - self._before), now
        self._sent += record.bytes_on_wire
        text = (
            f"loss {_loss(record.loss)}  {rate:,.0f} {self._unit}/s  "
            f"sync {1e3 * record.exposed_sync_s:.1f} ms  sent {_bytes(self._sent)}"
        )
        self._progress.update(self._task, advance=1, text=text)
        done = self._resumed + len(self._losses)
        if self._progress.disable and (done == self._steps or done % max(1, self._steps // _LINES) == 0):
            left = (now - self._begin) / len(self._losses) * (self._steps - done)
            self._say(f"step {done}/{self._steps}  {text}" + (f"  {duration(left)} left" if left else ""))

    def finish(self, quality: dict[str, float]) -> None:
        losses = self._losses or [None]  # no step remains if the checkpoint was saved after the last step
        first, last = losses[0], losses[-1]
        if not self._emit("trained", model=self._model, first_loss=first, last_loss=last, **quality):
            return
        self._progress.stop()
        parts = [f"loss {_loss(first)} → {_loss(last)}" if self._losses else "all steps done before this run"]
        for name, value in quality.items():
            number = f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.3f}"
            parts.append(f"{_QUALITY[name]} {number}")
        self._console.print("learnt: " + ", ".join(parts) + "\n", highlight=False)

    def norms(self, plot: Path | None, last: StepRecord | None) -> None:
        """Report the measured gradient norms and noise scale.

        Args:
            plot: the file with the plot; None without matplotlib.
            last: the last step with an estimate of the noise scale.
        """
        found = last.noise_scale if last else None
        scale, spread = (found.scale, found.spread) if found else (None, None)
        values = {"plot": plot and str(plot), "noise_scale": scale, "spread": spread}
        if not self._emit("norms", model=self._model, **values):
            return
        if last is not None and scale is not None:
            batch = f"{last.count:,.0f} {self._unit}"
            self._say(f"noise scale: {with_spread(scale, spread)} {self._unit}; batch: {batch}")
        self._say(f"gradient norms: {plot or 'not drawn, since matplotlib is not installed'}\n")

    def compare(self, ours: Row, ddp: Row) -> None:
        """Report the comparison of this mode with plain DDP."""
        is_noise = ours.step_s.overlaps(ddp.step_s)
        for row in (ours, ddp):
            seconds = {"step_s": row.step_s.mid, "step_low_s": row.step_s.low, "step_high_s": row.step_s.high}
            values = asdict(row) | seconds | {"step_is_within_noise": is_noise}
            is_text = self._emit("comparison", model=self._model, **values)
        if not is_text:
            return
        table = Table(
            title=f"{self._model}: the same windows in both modes, measured in this run",
            caption="median step: the difference is within noise" if is_noise else None,
            caption_justify="left",
        )
        table.add_column("")
        add_numbers(
            table, ("collectives", "sent\nper rank", "median\nstep", "spread", "error", "error,\nshort")
        )
        for row in (ours, ddp):
            times = duration(row.step_s.mid), f"{row.step_s.spread:.0%}"
            errors = f"{row.full_window:.1e}", f"{row.short_window:.1e}"
            table.add_row(row.label, str(row.collectives), _bytes(row.bytes_sent), *times, *errors)
        self._print(table)
        self._console.print(_LEGEND + "\n", style="dim", highlight=False)

    def trace(self, path: Path, *, windows: int) -> None:
        if self._emit("trace", model=self._model, path=str(path), windows=windows):
            self._say(f"trace of {windows} windows: {path} (open it in Perfetto or chrome://tracing)\n")


_LEGEND = (
    "collectives, sent: for the gradients of one window, assuming ring all-reduces. spread: "
    "slowest minus fastest window, divided by the median. error: relative difference between the window's "
    "gradient and that of one float64 backward over the whole global batch; short: the same for a window "
    "with fewer micro-batches and unequal counts. plain DDP: mean loss / accumulate, and an all-reduce in "
    "every backward; with a correct no_sync it sends as few bytes as GradSync with the same wire."
)
_QUALITY = {"held_out_loss": "held-out loss", "accuracy": "test accuracy"}


def _loss(value: float | None) -> str:
    return f"{float('nan') if value is None else value:.3f}"


def _bytes(value: int) -> str:
    return f"{value} B" if value < 1000 else decimal(value)
