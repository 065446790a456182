"""Plots of the results of `bench_peers.py`: docs/numbers.svg and docs/numbers-growth.svg.

They stand on a light card of their own, so that pages with dark grounds show them as they are. A plot's last
line tells from which figures it was drawn, by which a test knows one that is older than its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _peer_results import Measured, first

# ---- how exposed sync grows: straight lines through medians ----


@dataclass(frozen=True)
class Slope:
    """What grows.

    Attributes:
        title: of the column.
        points: by name, the launches of one point; the first in which a variant took part is taken.
        x: of a launch.
    """

    title: str
    points: dict[str, tuple[str, ...]]
    x: Callable[[Measured], float]


def _parameters(one: Measured) -> float:
    return one.content["about"]["parameters"] / 1e6


def _micro_batches(one: Measured) -> float:
    return one.launch["accumulate"]


def _workers(one: Measured) -> float:
    return one.launch["world"]


_BASE, _GBIT = ("base", "wires"), ("gbit", "gbit-wires")
SLOPES = (
    Slope("ms a million parameters, loopback", {"5m": ("5m",), "17m": _BASE, "26m": ("26m",)}, _parameters),
    Slope(
        "ms a million parameters, 1 Gbit/s",
        {"5m": ("gbit-5m",), "17m": _GBIT, "26m": ("gbit-26m",)},
        _parameters,
    ),
    Slope(
        "ms a micro-batch, loopback",
        {"1": ("every-1",), "4": ("every-4",), "8": _BASE, "16": ("every-16",)},
        _micro_batches,
    ),
    Slope("ms a worker, loopback", {"2": _BASE, "4": ("workers-4",)}, _workers),
    Slope(
        "ms a worker, 1 Gbit/s",
        {"2": _GBIT, "4": ("gbit-workers-4",)},
        _workers,
    ),
)


def line(results: dict[str, Measured], name: str, of: Slope) -> list[tuple[float, float]]:
    """Return what grows and the ms of exposed sync, at every point in which a variant took part."""
    measured = [first(results, name, launches) for launches in of.points.values()]
    return [(of.x(one), one.exposed(name)) for one in measured if one is not None]


# ---- plots ----

# Peer or ours, and what the plot calls it. The order is that of the bars.
BARS = {
    "ddp": "DDP as it comes",
    "fsdp2_deferred": "FSDP2, reduce in the last",
    "zero1": "DeepSpeed, ZeRO-1",
    "zero0": "DeepSpeed, ZeRO-0",
    "megatron": "Megatron-core DDP",
    "accelerate": "Accelerate",
    "trainer": "Lightning Trainer",
    "no_sync_view": "DDP + no_sync, views",
    "engine": "pyengine GradSync",
    "no_sync_bf16": "DDP + no_sync, bf16 hook",
    "engine_bf16": "GradSync, bf16 wire",
    "engine_int8_ef": "GradSync, int8 wire with feedback",
    "engine_shared": "GradSync, shared memory",
}
_PANELS = {
    "1 Gbit/s between two hosts": ("gbit", "gbit-wires", "gbit-deepspeed"),
    "one host, loopback": ("base", "wires", "deepspeed"),
}
_GROWING = {"ddp": "DDP as it comes", "no_sync_view": "DDP + no_sync, views", "accelerate": "Accelerate"}
_GROWING |= {"engine": "GradSync", "engine_bf16": "GradSync, bf16 wire"}
_STYLE = {
    "svg.hashsalt": "pyengine",
    "svg.fonttype": "path",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_CARD, _INK, _OURS, _PEER = "#ffffff", "#1f2933", "#1668b8", "#9aa5b1"

Results = dict[str, Measured]


@dataclass(frozen=True)
class Plot:
    """A file of docs/, the figures it is drawn from, and who draws them.

    Attributes:
        figures: what is drawn, as JSON can hold it; empty where files are missing.
    """

    name: str
    figures: Callable[[Results], dict[str, Any]]
    paint: Callable[[Any, dict[str, Any]], None]
    size: tuple[float, float]


def digest(plot: Plot, results: Results) -> str:
    """Return the line that a plot of these figures ends with."""
    text = json.dumps([plot.name, plot.figures(results)])
    return f"<!-- numbers: {hashlib.sha256(text.encode()).hexdigest()[:16]} -->"


def draw(plot: Plot, results: Results, folder: Path) -> None:
    """Write a plot; the same figures give the same file."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    path = folder / plot.name
    with matplotlib.rc_context(_STYLE | {"text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=plot.size, layout="constrained", facecolor=_CARD)
        plot.paint(figure, plot.figures(results))
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
    text = "".join(f"{row.rstrip()}\n" for row in path.read_text().splitlines())
    path.write_text(f"{text}{digest(plot, results)}\n")
    print("wrote", path)


# ---- numbers.svg ----


def _exposed(results: Results) -> dict[str, Any]:
    """Return exposed sync in ms, by panel and bar, and each panel's floor."""
    found: dict[str, Any] = {}
    for title, launches in _PANELS.items():
        if launches[0] not in results or launches[1] not in results:
            return {}
        measured = {name: first(results, name, launches) for name in BARS}
        bars = {
            name: round(max(0.0, one.exposed(name)), 1) for name, one in measured.items() if one is not None
        }
        found[title] = {"bars": bars, "floor": round(results[launches[0]].median("floor"), 1)}
    return found


def _paint_exposed(figure: Any, figures: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(figures))
    for axes, (title, panel) in zip(panels, figures.items(), strict=True):
        longest = max(panel["bars"].values())
        for place, name in enumerate(BARS):
            if name not in panel["bars"]:
                continue
            value, is_ours = panel["bars"][name], name.startswith("engine")
            axes.barh(place, value, color=_OURS if is_ours else _PEER, height=0.72)
            text = f"{value:,.0f} ms"
            axes.text(value + 0.015 * longest, place, text, va="center", fontsize=9.5, color=_INK)
        axes.set(yticks=[], xlim=(0, 1.2 * longest), xticks=[], ylim=(len(BARS) - 0.4, -0.6))
        axes.spines["bottom"].set_visible(False)
        axes.set_title(title, loc="left", fontsize=11)
    for place, (name, label) in enumerate(BARS.items()):
        weight = "bold" if name.startswith("engine") else "normal"
        beside = {"xy": (0, place), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        panels[0].annotate(label, xytext=(-6, 0), ha="right", va="center", fontweight=weight, **beside)
    floor = next(iter(figures.values()))["floor"]
    figure.suptitle(
        f"Waiting for gradients in a window of 8 micro-batches, beside {floor / 1000:.2g} s of work",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
    )


# ---- numbers-growth.svg ----


def _growth(results: Results) -> dict[str, Any]:
    """Return the points of every line, by panel."""
    found: dict[str, Any] = {}
    for of in SLOPES[:4]:
        points = {name: line(results, name, of) for name in _GROWING}
        if min(map(len, points.values())) < 2:
            return {}
        found[of.title] = {name: [(round(x, 1), round(y, 1)) for x, y in xys] for name, xys in points.items()}
    return found


def _paint_growth(figure: Any, figures: dict[str, Any]) -> None:
    axis = ("million parameters", "million parameters", "micro-batches a window", "workers")
    colours = ("#52606d", "#d97706", "#0f9d76", _OURS, "#7c3aed")
    for axes, (title, lines), label in zip(figure.subplots(1, 4), figures.items(), axis, strict=True):
        for (name, points), colour in zip(lines.items(), colours, strict=True):
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker="o", ms=4, lw=1.8, color=colour, label=_GROWING[name])
        axes.set(xlabel=label, ylim=(0, None), xlim=(0, None))
        axes.set_title(title.partition(", ")[2], fontsize=10.5)
        axes.grid(axis="y", color="#e4e7eb", lw=0.8)
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel("exposed sync, ms")
    figure.axes[0].legend(fontsize=8.5, frameon=False)


PLOTS = (
    Plot("numbers.svg", _exposed, _paint_exposed, (11, 4.4)),
    Plot("numbers-growth.svg", _growth, _paint_growth, (13, 3.4)),
)
