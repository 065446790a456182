"""The report of a study: one HTML page that needs nothing else, pictures included."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from pyengine.cli.study.analysis import (
    STALL_RATIO,
    STALL_SIGMAS,
    Analysis,
    Figures,
    Stall,
    duration,
    percent,
    recommend,
)
from pyengine.cli.study.arguments import Settings
from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.plots import Plot
from pyengine.cli.study.progress import HEADINGS, MORE_HEADINGS, row
from pyengine.cli.study.store import Record
from pyengine.cli.study.supervise import log_path

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_BUSY = 0.1  # of the machine, used by others


@dataclass(frozen=True)
class Content:
    """What a report is made of."""

    settings: Settings
    machine: dict[str, str | int]
    records: Sequence[Record]
    impossible: dict[Cell, str]
    analysis: Analysis
    plots: Sequence[Plot]


def write(content: Content, path: Path) -> None:
    """Write the page; the one that was there is replaced at once, never half."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(_values(content))
    part = path.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    part.replace(path)


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
        "stalls": [_describe(stall) for stall in analysis.stalls],
        "with_stalls": [_with_and_without(figures) for figures in _stalled(analysis)],
        "rule": {"warm_up": WARM_UP_STEPS, "sigmas": STALL_SIGMAS, "ratio": STALL_RATIO},
        "machine": content.machine,
        "settings": _settings(settings),
        "runs": len(content.records),
        "busy": sum(record.busy > _BUSY for record in content.records),
        "busy_limit": percent(_BUSY),
        "spent": duration(sum(record.wall_s for record in content.records)),
    }


def _describe(stall: Stall) -> str:
    where = f"step {stall.step} of {stall.record.cell}, repeat {stall.record.repeat + 1}"
    return f"{where}: {duration(stall.seconds)} instead of {duration(stall.usual_s)}"


def _stalled(analysis: Analysis) -> list[Figures]:
    cells = {stall.record.cell for stall in analysis.stalls}
    return [figures for cell, figures in analysis.cells.items() if cell in cells]


def _with_and_without(figures: Figures) -> tuple[str, str, str]:
    return str(figures.cell), f"{figures.samples_s.mid:,.0f}", f"{figures.samples_s_with_stalls.mid:,.0f}"


def _settings(settings: Settings) -> dict[str, str]:
    limit = "no limit" if settings.micro_batch is None else str(settings.micro_batch)
    return {
        "workers": ", ".join(map(str, settings.workers)),
        "batch": f"{', '.join(map(str, settings.batches))} ({settings.fixed})",
        "micro-batch": limit,
        "training samples": f"{settings.dataset_size:,}",
        "epochs": f"{settings.epochs:g}",
        "repeats": str(settings.repeats),
        "threads a worker": str(settings.threads),
        "seed": json.dumps(settings.seed),
    }
