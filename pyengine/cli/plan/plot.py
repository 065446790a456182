"""Windows over hosts, a line a wire and a panel a link, as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG

from pyengine.cli.plan.network import Row
from pyengine.cli.study.axes import STYLE, count_axis, panels


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the window of every row."""
    links = [*dict.fromkeys(row.link_gbit_s for row in rows)]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "pyengine", "svg.fonttype": "none"}):
        figure, found = panels(len(links), min(2, len(links)))
        for axes, link in zip(found, links, strict=True):
            _panel(axes, [row for row in rows if row.link_gbit_s == link])
            axes.set_title(f"{link:g} Gbit/s")
        found[0].legend()
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    for wire in dict.fromkeys(row.wire for row in rows):
        mine = sorted((row.world_size, 1e3 * row.window_s) for row in rows if row.wire == wire)
        axes.plot(*zip(*mine, strict=True), marker="o", label=wire)
    axes.set_yscale("log")
    axes.set_ylabel("window (ms)")
    count_axis(axes, sorted({row.world_size for row in rows}))
