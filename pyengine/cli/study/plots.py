"""The plots of a study, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pyengine.cli.study.analysis import Analysis, Curve, Figures, Range
from pyengine.cli.study.axes import (
    INK,
    STYLE,
    batch_axis,
    legend,
    lines,
    looks,
    panels,
    single,
    speed_up_axis,
    workers_axis,
)
from pyengine.cli.study.grid import Cell

_DASHED, _DOTTED = (0, (5, 4)), (0, (1.5, 2))
_ABSENT = "#e4e1da"


@dataclass(frozen=True)
class Plot:
    """A picture and what it shows."""

    title: str
    caption: str
    path: Path


def draw(analysis: Analysis, folder: Path) -> list[Plot]:
    """Draw everything there is data for.

    Args:
        analysis: with at least one cell.
        folder: for the files, made if it is not there; pictures of an earlier report are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    with matplotlib.rc_context(STYLE):
        for paint, title, caption in _PICTURES:
            path = folder / f"{paint.__name__.strip('_')}.png"
            path.unlink(missing_ok=True)
            figure = paint(analysis)
            if figure is not None:
                FigureCanvasAgg(figure).print_png(path)
                plots.append(Plot(title, caption, path))
    return plots


def _speed_up(analysis: Analysis) -> Figure | None:
    speed_ups = [figures.speed_up for figures in analysis.cells.values() if figures.speed_up]
    if not speed_ups:
        return None
    figure, axes = single()
    lines(axes, analysis, lambda figures: figures.speed_up)
    most = max(2, analysis.workers[-1])
    axes.plot([1, most], [1, most], color=INK, linestyle=_DASHED, linewidth=1.2, label="ideal", zorder=1)
    speed_up_axis(axes, min(each.low for each in speed_ups), max(most, *(each.high for each in speed_ups)))
    workers_axis(axes, analysis)
    legend(axes, analysis)
    return figure


def _throughput(analysis: Analysis) -> Figure:
    figure, axes = single()
    lines(axes, analysis, lambda figures: figures.samples_s)
    axes.set_ylabel("throughput (samples/s)")
    _from_zero(axes)
    workers_axis(axes, analysis)
    legend(axes, analysis)
    return figure


def _accuracy_over_time(analysis: Analysis) -> Figure | None:
    return _accuracy(analysis, "training time (s)", lambda curve: curve.seconds)


def _accuracy_over_steps(analysis: Analysis) -> Figure | None:
    return _accuracy(analysis, "optimizer steps", lambda curve: curve.steps)


def _accuracy(analysis: Analysis, label: str, along: Callable[[Curve], Sequence[float]]) -> Figure | None:
    """Draw a panel a batch, a colour a number of workers, and a line a run."""
    if not analysis.curves:
        return None
    batches = sorted({cell.batch for cell in analysis.curves})
    figure, each = panels(len(batches), _COLUMNS.get(len(batches), 3), width=4.6)
    for batch, axes in zip(batches, each, strict=True):
        for workers, (colour, _) in looks(analysis.workers).items():
            for number, curve in enumerate(analysis.curves.get(Cell(workers, batch), [])):
                name = str(workers) if number == 0 else None
                axes.plot(along(curve), curve.accuracy, color=colour, linewidth=1.6, alpha=0.85, label=name)
        if analysis.goal is not None:
            axes.axhline(analysis.goal, color=INK, linestyle=_DOTTED, linewidth=1.2)
        axes.set_title(f"{batch_axis(analysis)} {batch}")
        axes.set(xlabel=label, ylabel="accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlim(left=0)
        axes.legend(title="workers", loc="lower right", alignment="left")
    return figure


def _heat_map(analysis: Analysis) -> Figure:
    """Draw throughput and, where there is one, the time to the goal: workers over batch."""
    maps = [("throughput (samples/s)", lambda figures: figures.samples_s, "{:,.0f}", "cividis")]
    if any(figures.goal_s for figures in analysis.cells.values()):
        maps.append(
            (f"time to {analysis.goal:.1%} (s)", lambda figures: figures.goal_s, "{:.3g}", "cividis_r")
        )
    figure, each = panels(len(maps), len(maps))
    for (title, pick, form, colours), axes in zip(maps, each, strict=True):
        _map(axes, analysis, pick, form, colours)
        axes.set_title(title)
    return figure


def _map(
    axes: Axes, analysis: Analysis, pick: Callable[[Figures], Range | None], form: str, colours: str
) -> None:
    """Draw a tile a cell, its figure in it; light is good."""
    all_cells = {*analysis.cells, *(record.cell for record in analysis.ended)}
    workers = sorted({cell.workers for cell in all_cells})
    batches = sorted({cell.batch for cell in all_cells})
    ranges = {cell: pick(figures) for cell, figures in analysis.cells.items()}
    values = {cell: figure.mid for cell, figure in ranges.items() if figure}
    low, high = min(values.values()), max(values.values())
    for x, batch in enumerate(batches):
        for y, count in enumerate(workers):
            cell = Cell(count, batch)
            share = (values[cell] - low) / (high - low) if cell in values and high > low else 0.5
            colour = matplotlib.colormaps[colours](share) if cell in values else _ABSENT
            text = form.format(values[cell]) if cell in values else _why_absent(analysis, cell)
            if cell in values and analysis.cells[cell].is_oversubscribed:
                text += "\n(shared cores)"
            axes.fill_between([x - 0.49, x + 0.49], y - 0.49, y + 0.49, color=colour, linewidth=0)
            ink = "white" if cell in values and _is_dark(to_rgb(colour)) else INK
            axes.text(x, y, text, ha="center", va="center", fontsize=10, color=ink)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, len(batches) - 0.5), ylim=(-0.5, len(workers) - 0.5))
    axes.set_xticks(range(len(batches)), map(str, batches))
    axes.set_yticks(range(len(workers)), map(str, workers))
    axes.set(xlabel=batch_axis(analysis), ylabel="workers")


def _why_absent(analysis: Analysis, cell: Cell) -> str:
    if cell in analysis.cells:
        return "not\nreached"
    ended = [record.status for record in analysis.ended if record.cell == cell]
    return ended[-1] if ended else "not run"


def _is_dark(colour: tuple[float, float, float]) -> bool:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def _resources(analysis: Analysis) -> Figure:
    """Draw what a step and a worker cost."""
    figure, (share, memory, cpu) = panels(3, 3, width=4.2)
    lines(share, analysis, lambda figures: figures.sync_share)
    share.set_title("share of a step that waits\nfor gradients")
    share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lines(memory, analysis, lambda figures: figures.memory_bytes.over(2**20))
    memory.set_title("peak memory of the\nlargest worker (MiB)")
    lines(cpu, analysis, lambda figures: figures.cpu_share)
    cpu.set_title("cores that a worker\nkeeps busy")
    for axes in (share, memory, cpu):
        _from_zero(axes)
        workers_axis(axes, analysis)
    legend(memory, analysis)
    return figure


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


_COLUMNS = {1: 1, 2: 2, 4: 2}  # by number of panels; else 3
_RANGE = "Median of the repeats; bars reach from the smallest to the largest."
_PICTURES: list[tuple[Callable[[Analysis], Figure | None], str, str]] = [
    (
        _speed_up,
        "Speed-up",
        (
            f"Throughput over that of one worker with the same batch. {_RANGE} Where workers share cores, "
            "this is not how hardware scales."
        ),
    ),
    (_throughput, "Throughput", f"Samples a second, stalls and first steps left out. {_RANGE}"),
    (
        _accuracy_over_time,
        "Accuracy over time",
        (
            "A line a run; time is that of training alone, evaluations left out. Dots: the accuracy whose "
            "time is compared."
        ),
    ),
    (_accuracy_over_steps, "Accuracy over steps", "The same over optimizer steps."),
    (_heat_map, "Batch × workers", "Light is good; grey says why there is no figure."),
    (_resources, "What a step and a worker cost", _RANGE),
]
