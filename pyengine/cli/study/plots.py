"""The plots of a study, as PNG or SVG files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from pyengine.cli.files import written
from pyengine.cli.gradient_measures import draw_noise_scale
from pyengine.cli.noise import Range, duration
from pyengine.cli.plot_style import ABSENT, INK, RAMP, SHADE, STYLE, save_svg
from pyengine.cli.study.analysis import Analysis, Curve, Figures
from pyengine.cli.study.grid import Cell

_MARKERS = "osD^vPX*"
_DPI = 130
_ON_LIGHT = "#111111"  # text color on light tiles; tiles keep their color on dark pages, so the text does too
_DASHED, _DOTTED = (0, (5, 4)), (0, (1.5, 2))


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    path: Path


def draw(analysis: Analysis, folder: Path, *, suffix: str = ".png") -> list[Plot]:
    """Draw each plot for which there is data, and replace earlier files.

    Args:
        analysis: an analysis with at least one cell.
        folder: the folder of the files, which is created if missing.
        suffix: the file format, ".png" or ".svg".
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    with matplotlib.rc_context(STYLE):
        for paint, title, caption in _PICTURES:
            path = folder / f"{paint.__name__.strip('_')}{suffix}"
            path.unlink(missing_ok=True)
            figure = paint(analysis)
            if figure is not None:
                with written(path) as part:
                    if suffix == ".svg":
                        save_svg(figure, part)
                    else:
                        figure.savefig(part, metadata={"Date": None})
                plots.append(Plot(title, caption, path))
    return plots


def _speed_up(analysis: Analysis) -> Figure | None:
    speed_ups = [figures.speed_up for figures in analysis.cells.values() if figures.speed_up]
    if not speed_ups:
        return None
    figure, (axes,) = _panels(1, 1, width=7.6, height=4.8)
    _lines(axes, analysis, lambda figures: figures.speed_up)
    most = max(2, analysis.workers[-1])
    axes.plot([1, most], [1, most], color=INK, linestyle=_DASHED, linewidth=1.2, label="ideal", zorder=1)
    low, high = min(each.low for each in speed_ups), max(most, *(each.high for each in speed_ups))
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(0.9, low * 0.85), high * 1.15)
    _ticks(axes.yaxis, [2.0**power for power in range(-6, 16)])
    axes.set_ylabel("speed-up over one worker (×)")
    _legend(axes, analysis)
    return figure


def _throughput(analysis: Analysis) -> Figure:
    figure, (axes,) = _panels(1, 1, width=7.6, height=4.8)
    _lines(axes, analysis, lambda figures: figures.samples_s)
    axes.set_ylabel("throughput (samples/s)")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    _legend(axes, analysis)
    return figure


def _accuracy_over_time(analysis: Analysis) -> Figure | None:
    return _accuracy(analysis, "training time (s)", lambda curve: curve.seconds)


def _accuracy_over_steps(analysis: Analysis) -> Figure | None:
    return _accuracy(analysis, "optimizer steps", lambda curve: curve.steps)


def _accuracy(analysis: Analysis, label: str, along: Callable[[Curve], Sequence[float]]) -> Figure | None:
    """Draw a panel for each batch size, with a line for each run, colored by the number of workers."""
    if not analysis.curves:
        return None
    batches = sorted({cell.batch for cell in analysis.curves})
    figure, each = _panels(len(batches), _COLUMNS.get(len(batches), 3), width=4.6)
    for batch, axes in zip(batches, each, strict=True):
        for workers, (colour, _) in _looks(analysis.workers).items():
            for number, curve in enumerate(analysis.curves.get(Cell(workers, batch), [])):
                name = str(workers) if number == 0 else None
                axes.plot(along(curve), curve.accuracy, color=colour, linewidth=1.6, alpha=0.85, label=name)
        if analysis.goal is not None:
            axes.axhline(analysis.goal, color=INK, linestyle=_DOTTED, linewidth=1.2)
        axes.set_title(f"{_batch_axis(analysis)} {batch}")
        axes.set(xlabel=label, ylabel="accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=label == "optimizer steps"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlim(left=0)
        axes.legend(title="workers", loc="lower right", alignment="left")
    return figure


def _heat_map(analysis: Analysis) -> Figure:
    """Draw throughput and, if the goal was reached, the time to the goal, by workers and batch size.

    Each tile shows the value of a cell; lighter tiles are better.
    """
    maps: list[tuple[str, Callable[[Figures], Range | None], Callable[[float], str], str]] = [
        ("throughput (samples/s)", lambda figures: figures.samples_s, "{:,.0f}".format, "cividis")
    ]
    if any(figures.goal_s for figures in analysis.cells.values()):
        maps.append((f"time to {analysis.goal:.1%}", lambda figures: figures.goal_s, duration, "cividis_r"))
    all_cells = {*analysis.cells, *(record.cell for record in analysis.ended)}
    workers = sorted({cell.workers for cell in all_cells})
    batches = sorted({cell.batch for cell in all_cells})
    figure, panels = _panels(len(maps), len(maps))
    for (title, pick, text_of, colours), axes in zip(maps, panels, strict=True):
        values = {cell: found.mid for cell, each in analysis.cells.items() if (found := pick(each))}
        low, high = min(values.values()), max(values.values())
        for (x, batch), (y, count) in itertools.product(enumerate(batches), enumerate(workers)):
            cell = Cell(count, batch)
            colour: Any = ABSENT
            ink = INK
            text = _why_absent(analysis, cell)
            if cell in values:
                share = (values[cell] - low) / (high - low) if high > low else 0.5
                colour, text = matplotlib.colormaps[colours](share), text_of(values[cell])
                text += "\n(shared cores)" if analysis.cells[cell].is_oversubscribed else ""
                red, green, blue, _ = colour
                is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                ink = "white" if is_dark else _ON_LIGHT  # for contrast
            axes.fill_between([x - 0.49, x + 0.49], y - 0.49, y + 0.49, color=colour, linewidth=0)
            axes.text(x, y, text, ha="center", va="center", fontsize=10, color=ink)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks(range(len(batches)), map(str, batches))
        axes.set_yticks(range(len(workers)), map(str, workers))
        axes.set(title=title, xlabel=_batch_axis(analysis), xlim=(-0.5, len(batches) - 0.5))
        axes.set(ylabel="workers", ylim=(-0.5, len(workers) - 0.5))
    return figure


def _why_absent(analysis: Analysis, cell: Cell) -> str:
    if cell in analysis.cells:
        return "not\nreached"
    ended = [record.status for record in analysis.ended if record.cell == cell]
    return ended[-1] if ended else "not run"


def _noise_scale(analysis: Analysis) -> Figure | None:
    """Draw the noise scale over the global batch size, one point per cell, colored by number of workers."""
    known = [figures for figures in analysis.cells.values() if figures.noise_scale]
    if not known:
        return None
    figure, (axes,) = _panels(1, 1, width=7.6, height=4.8)
    for workers, (colour, marker) in _looks(analysis.workers).items():
        row = [figures for figures in known if figures.cell.workers == workers]
        if not row:  # with a single worker no noise scale is measured
            continue
        draw_noise_scale(
            axes,
            [figures.global_batch for figures in row],
            [(figures.noise_scale.mid, figures.noise_spread) for figures in row if figures.noise_scale],
            color=colour,
            marker=marker,
            markersize=7,
            label=str(workers),
        )
    batches = sorted({figures.global_batch for figures in analysis.cells.values()})
    axes.plot(batches, batches, color=INK, linestyle=_DASHED, linewidth=1.2, label="the batch", zorder=1)
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, batches)
    axes.set(xlabel="global batch", ylabel="noise scale (samples)")
    axes.legend(title="workers", loc="best", alignment="left")
    return figure


def _resources(analysis: Analysis) -> Figure:
    """Draw the share of waiting time, stalls, memory and busy cores."""
    figure, (share, stalls, memory, cpu) = _panels(4, 2)
    panels: list[tuple[Axes, str, Callable[[Figures], Range]]] = [
        (share, "share of a step that waits\nfor gradients", lambda figures: figures.sync_share),
        (stalls, "steps of a run\nthat stalled", lambda figures: figures.stalls),
        (
            memory,
            "peak memory of the\nlargest worker (MiB)",
            lambda figures: figures.memory_bytes.over(2**20),
        ),
        (cpu, "busy cores\nof a worker", lambda figures: figures.cpu_share),
    ]
    for axes, title, pick in panels:
        _lines(axes, analysis, pick)
        axes.set_title(title)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    stalls.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    stalls.set_ylim(top=max(1, stalls.get_ylim()[1]))
    _legend(memory, analysis)
    return figure


# ---- axes ----


def _panels(
    count: int, columns: int, *, width: float = 5.2, height: float = 3.9
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its `count` panels, row by row."""
    rows = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 6.4), height * rows), dpi=_DPI, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _looks(values: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return a color and a marker for each value.

    The colors go from dark to light, and color-blind readers can distinguish them.
    """
    step = (len(RAMP) - 1) / max(1, len(values) - 1)
    return {
        value: (RAMP[round(number * step)], _MARKERS[number % len(_MARKERS)])
        for number, value in enumerate(values)
    }


def _lines(axes: Axes, analysis: Analysis, pick: Callable[[Figures], Range | None]) -> None:
    """Plot a value over the number of workers, with one line per batch size.

    Bars extend from the smallest to the largest repeat. The worker axis is logarithmic with base 2, and the
    plot is shaded where workers share cores.
    """
    for batch, (colour, marker) in _looks(analysis.batches).items():
        found = [(figures.cell.workers, pick(figures)) for figures in analysis.row(batch)]
        points = [(workers, figure) for workers, figure in found if figure is not None]
        axes.errorbar(
            [workers for workers, _ in points],
            [figure.mid for _, figure in points],
            yerr=[[f.mid - f.low for _, f in points], [f.high - f.mid for _, f in points]],
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.8,
            capsize=4,
            elinewidth=1.2,
            label=str(batch),
        )
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, analysis.workers)
    axes.set_xlim(0.85, analysis.workers[-1] * 1.18)
    axes.set_xlabel("workers")
    cells = analysis.cells.values()
    shared = [figures.cell.workers for figures in cells if figures.is_oversubscribed]
    alone = [figures.cell.workers for figures in cells if not figures.is_oversubscribed]
    if shared:
        edge = (min(shared) * max(alone)) ** 0.5 if alone else 0.85
        axes.axvspan(edge, analysis.workers[-1] * 1.18, color=SHADE, zorder=0, linewidth=0)


def _legend(axes: Axes, analysis: Analysis) -> None:
    """Add a legend for the batch sizes, the ideal line and the shaded area."""
    handles, labels = axes.get_legend_handles_labels()
    if any(figures.is_oversubscribed for figures in analysis.cells.values()):
        handles.append(Patch(color=SHADE))
        labels.append(f"workers share the {analysis.cores} cores")
    axes.legend(handles, labels, title=_batch_axis(analysis), loc="best", alignment="left")


def _batch_axis(analysis: Analysis) -> str:
    return "global batch" if analysis.fixed == "global" else "batch per worker"


def _ticks(axis: Axis, values: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())


_COLUMNS = {1: 1, 2: 2, 4: 2}  # columns by number of panels; 3 for other numbers
_RANGE = "Median of the repeats; bars extend from the smallest to the largest repeat."
_PICTURES: list[tuple[Callable[[Analysis], Figure | None], str, str]] = [
    (
        _speed_up,
        "Speed-up",
        (
            f"Throughput divided by one worker's throughput with the same batch. {_RANGE} Where workers "
            "share cores, the speed-up does not show the effect of more hardware."
        ),
    ),
    (_throughput, "Throughput", f"Samples per second, without stalls and the first steps. {_RANGE}"),
    (
        _accuracy_over_time,
        "Accuracy over time",
        (
            "One line per run, over the training time without evaluations. Dotted: the accuracy at which "
            "times are compared."
        ),
    ),
    (_accuracy_over_steps, "Accuracy over steps", "The same curves over the number of optimizer steps."),
    (_heat_map, "Batch × workers", "Lighter is better; gray cells have no value."),
    (
        _noise_scale,
        "Noise scale",
        (
            "Median of the repeats; bars: standard error of a run. Above the dashed line a larger batch "
            "pays off, below it a smaller one."
        ),
    ),
    (_resources, "Waiting, stalls, memory and cores", _RANGE),
]
