"""Axes for plots over workers: style, colours, lines with ranges, and the shade where workers share cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from pyengine.cli.study.analysis import Analysis, Figures, Range

INK = "#222222"
STYLE: dict[Any, Any] = {  # rc_context wants a dict of two hundred literal names
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}
_SHADE = "#efece4"
_MARKERS = "osD^vPX*"
_DPI = 130

Colour = tuple[float, ...]


def single() -> tuple[Figure, Axes]:
    """Return a picture with one panel."""
    figure = Figure(figsize=(7.6, 4.8), dpi=_DPI, layout="constrained")
    return figure, figure.add_subplot()


def panels(count: int, columns: int, *, width: float = 5.2) -> tuple[Figure, Sequence[Axes]]:
    """Return a picture with several panels, row by row."""
    rows = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 6.4), 3.9 * rows), dpi=_DPI, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def looks(values: Iterable[int]) -> dict[int, tuple[Colour, str]]:
    """Return a colour and a marker for each value, dark to light: viridis,
    which keeps its order for every eye.
    """
    values = list(values)
    palette = matplotlib.colormaps["viridis"]
    shades = [palette(0.82 * number / max(1, len(values) - 1)) for number in range(len(values))]
    return {
        value: (shade, _MARKERS[number % len(_MARKERS)])
        for number, (value, shade) in enumerate(zip(values, shades, strict=True))
    }


def lines(axes: Axes, analysis: Analysis, pick: Callable[[Figures], Range | None]) -> None:
    """Draw a line a batch over workers, with bars from the smallest to the largest repeat."""
    for batch, (colour, marker) in looks(analysis.batches).items():
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


def count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """Lay numbers of workers out by powers of two."""
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, counts)
    axes.set_xlim(0.85, counts[-1] * 1.18)
    axes.set_xlabel("workers")


def workers_axis(axes: Axes, analysis: Analysis) -> None:
    """Lay the workers out, and shade where they are more than the cores."""
    count_axis(axes, analysis.workers)
    cells = analysis.cells.values()
    shared = [figures.cell.workers for figures in cells if figures.is_oversubscribed]
    alone = [figures.cell.workers for figures in cells if not figures.is_oversubscribed]
    if shared:
        edge = (min(shared) * max(alone)) ** 0.5 if alone else 0.85
        axes.axvspan(edge, analysis.workers[-1] * 1.18, color=_SHADE, zorder=0, linewidth=0)


def speed_up_axis(axes: Axes, low: float, high: float) -> None:
    """Lay speed-ups out by powers of two, from below `low` to above `high`."""
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(0.9, low * 0.85), high * 1.15)
    _ticks(axes.yaxis, [2.0**power for power in range(-6, 16)])
    axes.set_ylabel("speed-up over one worker (×)")


def legend(axes: Axes, analysis: Analysis) -> None:
    """Name the batches, the ideal line if there is one, and the shade."""
    handles, labels = axes.get_legend_handles_labels()
    if any(figures.is_oversubscribed for figures in analysis.cells.values()):
        handles.append(Patch(color=_SHADE))
        labels.append(f"workers share the {analysis.cores} cores")
    axes.legend(handles, labels, title=batch_axis(analysis), loc="best", alignment="left")


def batch_axis(analysis: Analysis) -> str:
    """Return what a batch is in this study."""
    return "global batch" if analysis.fixed == "global" else "batch a worker"


def _ticks(axis: Axis, values: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())
