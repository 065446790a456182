"""The plots in docs/ of result files: mean.svg, convergence.svg, numbers.svg and numbers-growth.svg.

The last line of a plot is a digest of its figures, with which a test finds plots that are older than their
result files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _peer_results import Measured, first, newest

from pyengine.cli.plot_style import EDGE, GREEN, INK, ORANGE, OURS, PEER, SHADE, STYLE, save_svg
from pyengine.wire.named import WIRES

# ---- growth of exposed sync: lines through medians ----


@dataclass(frozen=True)
class Slope:
    """A quantity with which exposed sync grows.

    Attributes:
        title: the title of the column.
        points: the launches of each point, by its name; the first launch that measured a variant is used.
        x: returns the quantity of a launch.
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
    Slope("ms per million parameters, loopback", {"5m": ("5m",), "17m": _BASE, "26m": ("26m",)}, _parameters),
    Slope(
        "ms per million parameters, 1 Gbit/s",
        {"5m": ("gbit-5m",), "17m": _GBIT, "26m": ("gbit-26m",)},
        _parameters,
    ),
    Slope(
        "ms per micro-batch, loopback",
        {"1": ("every-1",), "4": ("every-4",), "8": _BASE, "16": ("every-16",)},
        _micro_batches,
    ),
    Slope("ms per worker, loopback", {"2": _BASE, "4": ("workers-4",)}, _workers),
    Slope(
        "ms per worker, 1 Gbit/s",
        {"2": _GBIT, "4": ("gbit-workers-4",)},
        _workers,
    ),
)


def line(results: dict[str, Measured], name: str, of: Slope) -> list[tuple[float, float]]:
    """Return the quantity and the exposed sync in ms, at every point at which a variant was measured."""
    measured = [first(results, name, launches) for launches in of.points.values()]
    return [(of.x(one), one.exposed(name)) for one in measured if one is not None]


# ---- plots ----

# The variants, and their names in the plot, in the order of the bars.
BARS = {
    "ddp": "DDP without no_sync",
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
_GROWING = {"ddp": "DDP without no_sync", "no_sync_view": "DDP + no_sync, views", "accelerate": "Accelerate"}
_GROWING |= {"engine": "GradSync", "engine_bf16": "GradSync, bf16 wire"}
_LEAST = 10  # ms of exposed sync; smaller and negative values are noise, and drawn here
_TICKS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_STYLE = STYLE | {"font.size": 9.5, "axes.titlesize": 10, "axes.titleweight": "normal", "axes.grid": False}
_STYLE |= {"figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08}
_WIDTH = 8.65  # inches: 830 pixels, the width at which GitHub shows a picture

Results = dict[str, Measured]


@dataclass(frozen=True)
class Plot:
    """A plot in docs/: its file, the figures that it shows, and the function that draws them.

    Attributes:
        figures: returns the figures to draw, as JSON values, from the folder of result files; the result is
            empty if files are missing.
        height: height in inches.
    """

    name: str
    figures: Callable[[Path], dict[str, Any]]
    paint: Callable[[Any, dict[str, Any]], None]
    height: float


def digest(plot: Plot, folder: Path) -> str:
    """Return the last line of a plot, which is a digest of its figures."""
    text = json.dumps([plot.name, plot.figures(folder)])
    return f"<!-- numbers: {hashlib.sha256(text.encode()).hexdigest()[:16]} -->"


def draw(plot: Plot, results: Path, docs: Path) -> None:
    """Write a plot; the same figures give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, plot.height), layout="constrained")
        plot.paint(figure, plot.figures(results))
        save_svg(figure, docs / plot.name, last_line=digest(plot, results))
    print("wrote", docs / plot.name)


def _content(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a script's newest result file; empty if there is no file."""
    paths = sorted(folder.glob(f"????-??-??-{name}.json"))
    content: dict[str, Any] = json.loads(paths[-1].read_text()) if paths else {}
    return content


def _title(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _bars(axes: Any, bars: dict[str, tuple[float, str, str]]) -> None:
    """Draw horizontal bars from top to bottom; each has a length, a text after the bar, and a color."""
    longest = max(length for length, _, _ in bars.values())
    for place, (length, text, colour) in enumerate(bars.values()):
        axes.barh(place, length, color=colour, height=0.72)
        axes.text(length + 0.015 * longest, place, text, va="center")
    axes.set(yticks=[], xlim=(0, 1.22 * longest), xticks=[], ylim=(len(bars) - 0.4, -0.6))
    axes.spines["bottom"].set_visible(False)


def _name_rows(axes: Any, names: Sequence[str], ours: Sequence[bool]) -> None:
    """Write a name before each row, pyengine's names in bold."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    for label, is_ours in zip(axes.get_yticklabels(), ours, strict=True):
        label.set_fontweight("bold" if is_ours else "normal")


# ---- mean.svg ----

_CASES = {
    "full": "full window,\nmicro-batches of {longest} tokens",
    "short": "short last window,\n4 of 8 micro-batches",
    "tokens": "full window, micro-batches\nof {fewest} to {most} tokens",
}
_ROUNDING = 1e-5  # smaller errors are rounding errors of float32
_LOOPS = {"ddp": ("DDP loop", PEER, "s"), "engine": ("pyengine", OURS, "o")}
_SENT = {
    "ddp": "DDP without no_sync",
    "no_sync": "DDP + no_sync",
    "fp32": "pyengine",
    "bf16": "pyengine, bf16 wire",
    "int8-ef": "pyengine, int8 wire\nwith feedback",
}


def _mean(folder: Path) -> dict[str, Any]:
    """Return the errors of gradients by case and loop, and the bytes per window by loop."""
    content = _content(folder, "mean")
    return {key: content[key] for key in ("errors", "tokens", "bytes")} if content else {}


def _percent(error: float) -> str:
    return f"{100 * error:.6f} %" if error < _ROUNDING else f"{100 * error:.0f} %"


def _paint_mean(figure: Any, figures: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    offset = {"textcoords": "offset points"}
    longest = max(map(max, figures["tokens"]["full"]))
    fewest, most = (find(map(find, figures["tokens"]["tokens"])) for find in (min, max))
    for place, errors in enumerate(figures["errors"].values()):
        left.plot(list(errors.values()), [place] * len(errors), color=EDGE, lw=1, zorder=1)
        for loop, (_, colour, marker) in _LOOPS.items():
            left.plot(errors[loop], place, marker=marker, color=colour, ms=8, ls="none")
        if max(errors.values()) < _ROUNDING:  # too close together for two labels
            text = f"both ≤ {_percent(max(errors.values()))}"
            left.annotate(text, (max(errors.values()), place), (9, 0), va="center", **offset)
        else:
            for error in errors.values():
                left.annotate(_percent(error), (error, place), (0, -8), ha="center", va="top", **offset)
    names = [name.format(longest=longest, fewest=fewest, most=most) for name in _CASES.values()]
    _name_rows(left, names, [False] * len(names))
    left.set(xscale="log", xlim=(4e-9, 8), ylim=(len(names) - 0.4, -0.75))
    left.set_title("Relative error of the gradient")
    left.set_xticks([1e-7, 1e-4, 1e-1], ["0.00001 %", "0.01 %", "10 %"])
    left.minorticks_off()
    left.grid(axis="x")
    for loop, (name, colour, _) in _LOOPS.items():
        at = (figures["errors"]["short"][loop], 1)
        ink = OURS if colour == OURS else INK
        left.annotate(name, at, (0, 8), color=ink, ha="center", fontweight="bold", **offset)
    sent = figures["bytes"]
    _bars(
        right,
        {
            name: (sent[name] / 1e6, f"{sent[name] / 1e6:.0f} MB", PEER if "DDP" in label else OURS)
            for name, label in _SENT.items()
        },
    )
    _name_rows(right, list(_SENT.values()), ["DDP" not in label for label in _SENT.values()])
    right.set_title("Sent by a rank in a window")


# ---- convergence.svg ----

_QUALITY = {  # by model: the unit of the figures, and the title of the panel
    "gpt": (1, "GPT: held-out loss"),
    "cnn": (100, "CNN: wrong digits, percentage points"),
}


def _convergence(folder: Path) -> dict[str, Any]:
    """Return each seed's final quality minus fp32's, by model and wire; for fp32, minus the seeds' mean."""
    found: dict[str, Any] = {}
    for model, wires in _content(folder, "convergence").get("models", {}).items():
        first = wires["fp32"]["finals"]
        found[model] = {"fp32": [round(value - sum(first) / len(first), 5) for value in first]}
        for wire in (wire for wire in WIRES if wire in wires and wire != "fp32"):
            pairs = zip(wires[wire]["finals"], first, strict=True)
            found[model][wire] = [round(value - base, 5) for value, base in pairs]
    return found


def _paint_convergence(figure: Any, figures: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(figures), sharey=True)
    for axes, (model, wires) in zip(panels, figures.items(), strict=True):
        unit, title = _QUALITY[model]
        own = [unit * value for value in wires["fp32"]]
        axes.axvspan(min(own), max(own), color=SHADE, lw=0, zorder=0)
        axes.axvline(0, color=EDGE, lw=1, zorder=1)
        for place, (wire, values) in enumerate(wires.items()):
            colour = INK if wire == "fp32" else OURS
            for seed, value in enumerate(values):
                offset = 0.24 * (seed - (len(values) - 1) / 2)  # so that equal values do not overlap
                axes.plot(unit * value, place + offset, "o", color=colour, ms=4.5)
        widest = 1.15 * max(abs(unit * value) for values in wires.values() for value in values)
        axes.set(xlim=(-widest, widest), ylim=(len(wires) - 0.4, -0.6))
        axes.locator_params(axis="x", nbins=7)
        axes.set_title(title)
        axes.grid(axis="x")
    names = list(next(iter(figures.values())))
    _name_rows(panels[0], names, [False] * len(names))
    panels[-1].tick_params(axis="y", length=0)
    _title(figure, "Each dot is a seed minus fp32 with the same seed; shaded: fp32's seeds minus their mean")


# ---- numbers.svg ----


def _exposed(folder: Path) -> dict[str, Any]:
    """Return exposed sync in ms, by panel and bar, and each panel's floor."""
    results = newest(folder)
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
    is_ours = [name.startswith("engine") for name in BARS]
    for axes, (title, panel) in zip(panels, figures.items(), strict=True):
        bars = {}
        for name, ours in zip(BARS, is_ours, strict=True):
            value = panel["bars"].get(name)
            text = "" if value is None else f"{value:,.0f} ms"
            bars[name] = (value or 0.0, text, OURS if ours else PEER)
        _bars(axes, bars)
        axes.set_title(title)
    _name_rows(panels[0], list(BARS.values()), is_ours)
    floor = next(iter(figures.values()))["floor"]
    work = f"{floor / 1000:.2g} s of other work"
    _title(figure, f"Waiting for gradients in a window of 8 micro-batches, on top of {work}")


# ---- numbers-growth.svg ----


def _growth(folder: Path) -> dict[str, Any]:
    """Return the points of every line, by panel."""
    results = newest(folder)
    found: dict[str, Any] = {}
    for of in SLOPES[:4]:
        points = {name: line(results, name, of) for name in _GROWING}
        if min(map(len, points.values())) < 2:
            return {}
        found[of.title] = {name: [(round(x, 1), round(y, 1)) for x, y in xys] for name, xys in points.items()}
    return found


def _paint_growth(figure: Any, figures: dict[str, Any]) -> None:
    axis = ("million parameters", "million parameters", "micro-batches per window", "workers")
    looks = ((PEER, "s-"), (ORANGE, "D-"), (GREEN, "^-"), (OURS, "o-"), (OURS, "v:"))
    for axes, (title, lines), label in zip(figure.subplots(1, 4), figures.items(), axis, strict=True):
        for (name, points), (colour, look) in zip(lines.items(), looks, strict=True):
            xs, ys = zip(*((x, max(y, _LEAST)) for x, y in points), strict=True)
            axes.plot(xs, ys, look, ms=4, lw=1.6, color=colour, label=_GROWING[name])
        axes.set(xlabel=label, yscale="log", ylim=(0.8 * _LEAST, 9000), xlim=(0, None))
        axes.set_xticks(sorted({round(x) for points in lines.values() for x, _ in points}))
        axes.set_yticks(_TICKS, [f"{tick:,}" for tick in _TICKS] if axes is figure.axes[0] else [])
        axes.minorticks_off()
        axes.tick_params(axis="y", length=0)
        axes.set_title(title.partition(", ")[2])
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("exposed sync, ms")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=9, columnspacing=1.2)


PLOTS = (
    Plot("mean.svg", _mean, _paint_mean, 2.9),
    Plot("convergence.svg", _convergence, _paint_convergence, 3.9),
    Plot("numbers.svg", _exposed, _paint_exposed, 4.2),
    Plot("numbers-growth.svg", _growth, _paint_growth, 3.1),
)
