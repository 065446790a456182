"""The reports of a study: lines on the terminal while it runs, and a self-contained HTML page."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table

from pyengine.cli import report
from pyengine.cli.files import written
from pyengine.cli.gradient_measures import with_spread
from pyengine.cli.noise import Range, duration, percent
from pyengine.cli.report import add_numbers
from pyengine.cli.study.analysis import STALL_RATIO, STALL_SIGMAS, Analysis, Figures, recommend
from pyengine.cli.study.arguments import StudySettings
from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.plots import Plot
from pyengine.cli.study.store import Record
from pyengine.cli.study.supervise import log_path

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_BUSY = 0.1  # a run counts as disturbed if other programs use a larger share of the CPU


class StudyReport(report.Report):
    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__(as_json=as_json)
        columns = TimeElapsedColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.fields[text]}")
        # The line is refreshed only twice a second, because the workers may need every core.
        self._progress = self._make_progress(*columns, refresh_per_second=2)
        self._task = self._progress.add_task("runs", total=None, left="", text="")
        self._run = ""

    def live(self) -> AbstractContextManager[object]:
        return self._progress

    def plan(self, *, runs: int, kept: int, impossible: dict[Cell, str]) -> None:
        """Report the start of a study: the new runs, the existing runs, and the cells that cannot be run."""
        self._progress.update(self._task, total=runs + kept, completed=kept)
        if self._emit("plan", runs=runs, kept=kept):
            self._say(f"{runs + kept} runs{f', {kept} of them already done' if kept else ''}")
        for cell, reason in impossible.items():
            if self._emit("impossible", **asdict(cell), reason=reason):
                self._say(f"left out: {cell}: {reason}")

    def forecast(self, seconds: float | None) -> None:
        """Report the expected time of the missing runs; `seconds` is None if the trial run failed."""
        self._progress.update(self._task, left=_left(seconds))
        if self._emit("forecast", seconds=seconds):
            self._say(
                "duration unknown: the trial run did not succeed (see logs/trial.txt)"
                if seconds is None
                else f"about {duration(seconds)} in total, if no run stalls"
            )

    def begin(self, run: str) -> None:
        self._run = run
        self._progress.update(self._task, text=f"{self._run}: starting")

    def step(self, steps: int, done: int, accuracy: float | None) -> None:
        suffix = f", accuracy {percent(accuracy)}" if accuracy is not None and math.isfinite(accuracy) else ""
        self._progress.update(self._task, text=f"{self._run}: step {done}/{steps}{suffix}")

    def ran(self, record: Record, *, left_s: float | None) -> None:
        """Report the end of a run, whose steps are in runs.jsonl; the remaining runs take about `left_s`."""
        names = ("workers", "batch", "repeat", "status", "reason", "steps", "wall_s")
        self._progress.update(self._task, advance=1, left=_left(left_s))
        if self._emit("run", **{name: getattr(record, name) for name in names}, left_s=left_s):
            how = (
                f"done in {duration(record.wall_s)}"
                if record.is_done
                else f"{record.status}: {record.reason}"
            )
            left = f"; {_left(left_s)}" if left_s else ""
            self._say(f"{record.cell}, repeat {record.repeat + 1}: {how}{left}")

    def conclude(self, analysis: Analysis, page: Path) -> None:
        """Report the results of all runs; `page` is the HTML report."""
        for cell, figures in analysis.cells.items():
            self._emit("cell", **asdict(cell), **{k: v for k, v in asdict(figures).items() if k != "cell"})
        found = recommend(analysis)
        self._emit("recommendation", best=found.best and asdict(found.best), text=found.text)
        self._emit("report", goal=analysis.goal, stalls=len(analysis.stalls), page=str(page))
        if analysis.cells:
            self._print(_table(analysis))
        self._say(f"{found.text}\n\nreport: {page}")


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {duration(seconds)} left"


# `HEADINGS` fit into 80 columns; the HTML page also has `MORE_HEADINGS`.
HEADINGS = ("workers", "batch", "samples/s", "speed-up", "waits", "to goal", "best", "noise scale")
MORE_HEADINGS = ("efficiency", "batches/s", "memory", "cores")


def row(figures: Figures) -> tuple[str, ...]:
    """Return the medians of a cell as text, in the order of `HEADINGS` and `MORE_HEADINGS`."""
    return (
        f"{figures.cell.workers}{' *' if figures.is_oversubscribed else ''}",
        str(figures.cell.batch),
        f"{figures.samples_s.mid:,.0f}",
        ("~" if figures.is_within_noise else "") + _text(figures.speed_up, lambda value: f"{value:.2f}x"),
        percent(figures.sync_share.mid),
        _text(figures.goal_s, duration),
        _text(figures.accuracy, percent),
        _text(figures.noise_scale, lambda scale: with_spread(scale, figures.noise_spread)),
        _text(figures.efficiency, percent),
        f"{figures.batches_s.mid:,.1f}",
        f"{figures.memory_bytes.mid / 2**20:,.0f} MiB",
        f"{figures.cpu_share.mid:.2f}",
    )


def _text(figure: Range | None, form: Callable[[float], str]) -> str:
    return "–" if figure is None else form(figure.mid)


def _table(analysis: Analysis) -> Table:
    cells = analysis.cells.values()
    goal = f"goal: {percent(analysis.goal)}" if analysis.goal is not None else ""
    noise = "~ within noise of one worker" if any(each.is_within_noise for each in cells) else ""
    marks = "* workers that share cores" if any(each.is_oversubscribed for each in cells) else ""
    stalls = f"stalls left out: {len(analysis.stalls)}" if analysis.stalls else ""
    ended = f"runs that did not succeed: {len(analysis.ended)}" if analysis.ended else ""
    notes = "; ".join(note for note in (goal, noise, marks, stalls, ended) if note)
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, caption=notes or None, caption_justify="left"
    )
    add_numbers(table, HEADINGS)
    for figures in analysis.cells.values():
        table.add_row(*row(figures)[: len(HEADINGS)])
    return table


# ---- HTML page ----


@dataclass(frozen=True)
class Content:
    settings: StudySettings
    machine: dict[str, str | int]
    records: Sequence[Record]
    impossible: dict[Cell, str]
    analysis: Analysis
    plots: Sequence[Plot]


def write_page(content: Content, path: Path) -> None:
    """Write the HTML page, replacing an earlier page atomically."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(_values(content))
    with written(path) as part:
        part.write_text(page, encoding="utf-8")


def _values(content: Content) -> dict[str, Any]:
    analysis, settings = content.analysis, content.settings
    return {
        "subject": settings.subject,
        "recommendation": recommend(analysis).text,
        "pictures": [(plot, base64.b64encode(plot.path.read_bytes()).decode()) for plot in content.plots],
        "headings": HEADINGS + MORE_HEADINGS,
        "rows": [(row(figures), figures.is_oversubscribed) for figures in analysis.cells.values()],
        "goal": None if analysis.goal is None else percent(analysis.goal),
        "goal_from": analysis.goal_from,
        "cores": analysis.cores,
        "ended": [(record, log_path(record.cell, record.repeat)) for record in analysis.ended],
        "impossible": sorted(content.impossible.items()),
        "stalls": [
            f"step {stall.step} of {stall.record.cell}, repeat {stall.record.repeat + 1}: "
            f"{duration(stall.seconds)} instead of {duration(stall.usual_s)}"
            for stall in analysis.stalls
        ],
        "rule": {"warm_up": WARM_UP_STEPS, "sigmas": STALL_SIGMAS, "ratio": STALL_RATIO},
        "machine": content.machine,
        "settings": {
            "workers": ", ".join(map(str, settings.workers)),
            "batch": f"{', '.join(map(str, settings.batches))} ({settings.fixed})",
            "micro-batch": settings.micro_batch or "no limit",
            "training samples": f"{settings.dataset_size:,}",
            "epochs": f"{settings.epochs:g}",
            "repeats": settings.repeats,
            "threads per worker": settings.threads,
            "seed": settings.seed,
        },
        "runs": len(content.records),
        "busy": sum(record.busy > _BUSY for record in content.records),
        "busy_limit": percent(_BUSY),
        "spent": duration(sum(record.wall_s for record in content.records)),
    }
