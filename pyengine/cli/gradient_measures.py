"""Measure and plot gradient norms and the noise scale, for `train --trace` and `study`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyengine.cli.plot_style import INK, STYLE
from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord
from pyengine.window.noise_scale import NoiseScale

_MOST_LINES = 12  # maximum number of lines that a reader can distinguish in one panel
_BARS = 25  # approximate number of error bars in the plot of a run


def measure_noise_scale(sync: Sync, *, parts: int) -> None:
    """Measure the noise scale from the next window on; warn if the engine does not support it.

    Every rank must call this function at the same point.

    Args:
        parts: number of ranks or micro-batches whose gradients can be compared; with 1, nothing is measured.
    """
    try:
        if parts > 1:
            sync.measure(NoiseScale())
    except ValueError as error:  # every rank raises this error
        warnings.warn(f"no noise scale: {error}", stacklevel=2)


def with_spread(scale: float, spread: float | None) -> str:
    """Return a noise scale and its spread as text."""
    return _short(scale) if spread is None else f"{_short(scale)} ± {_short(spread)}"


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def layer_norms(norms: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the norms of every step by parameter or, for more than 12 parameters, by layer.

    A layer consists of all parameters whose names begin with the same components. As many components are
    compared as possible while there are at most 12 layers; at least one component is compared.
    """
    components = {name: name.split(".") for name in norms[0]}
    depth = max(map(len, components.values()))
    while depth > 1 and len({tuple(each[:depth]) for each in components.values()}) > _MOST_LINES:
        depth -= 1
    layers: dict[str, list[str]] = {}
    for name, each in components.items():
        layers.setdefault(".".join(each[:depth]), []).append(name)
    return {
        layer: [math.hypot(*(step[name] for name in names)) for step in norms]
        for layer, names in layers.items()
    }


def draw(records: Sequence[StepRecord], path: Path, *, unit: str) -> None:
    """Plot gradient norms over steps and, if known, the noise scale and the batch size.

    Args:
        records: step records that contain `grad_norms`.
        path: path of the PNG file.
        unit: unit of counts, for example "tokens".
    """
    import matplotlib  # matplotlib is optional: `train` also runs without it
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [record.step for record in records]
    lines = layer_norms([record.grad_norms for record in records if record.grad_norms is not None])
    known = [record for record in records if record.noise_scale and record.noise_scale.scale is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 7 if known else 4), dpi=130, layout="constrained")
        norms, *others = figure.subplots(2 if known else 1, sharex=True, squeeze=False)[:, 0]
        shades = matplotlib.colormaps["viridis"]
        for number, (name, values) in enumerate(lines.items()):
            norms.plot(steps, values, color=shades(number / len(lines)), linewidth=1.4, label=name)
        norms.set(title="Gradient norm, before clipping", yscale="log")
        norms.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        for axes in others:
            draw_noise_scale(
                axes,
                [record.step for record in known],
                [(each.scale, each.spread) for record in known if (each := record.noise_scale)],
                color=INK,
                errorevery=-(-len(known) // _BARS),
                label="± spread",
            )
            axes.plot(steps, [record.count for record in records], linestyle="--", color=INK, label="batch")
            axes.set_title(f"Noise scale ({unit})")
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.axes[-1].set_xlabel("optimizer step")
        figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(path)


def draw_noise_scale(
    axes: Any, xs: Sequence[float], estimates: Sequence[tuple[float | None, float | None]], **look: Any
) -> None:
    """Plot noise scales on a logarithmic axis, with their spreads as error bars.

    Args:
        axes: the matplotlib axes.
        xs: x coordinate of each estimate.
        estimates: pairs of scale and spread; the spread may be None.
        look: further keyword arguments for `Axes.errorbar`.
    """
    from matplotlib.ticker import LogFormatter

    scales = [scale for scale, _ in estimates]
    spreads = [spread or 0.0 for _, spread in estimates]
    axes.errorbar(xs, scales, yerr=spreads, capsize=3, linewidth=1.4, elinewidth=1, **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())  # formats 20 as 20, not as 2 × 10¹
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))
