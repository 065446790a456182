"""Colors and fonts of every plot, and SVG files for light and dark pages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

INK, EDGE, GRID = "#222222", "#9a9a9a", "#e4e4e4"
SHADE, ABSENT = "#efece4", "#e4e1da"
# Colors for pyengine and other libraries; color-blind readers can distinguish these colors.
OURS, PEER, ORANGE, GREEN = "#0868b5", "#868f98", "#c75a00", "#00876c"
# Eight colors of matplotlib's viridis, from dark to light.
RAMP = ("#440154", "#482576", "#404588", "#34618d", "#297b8e", "#20938c", "#25ac82", "#4ec36b")
STYLE: dict[Any, Any] = {  # Any, because the stubs of rc_context list every name
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.edgecolor": EDGE,
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.title_fontsize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "pyengine",  # identical figures produce identical files
}
# The replacement for each color on a dark page. Other colors do not change.
_DARK_GROUND = "#0d1117"
_DARK = {INK: "#e6edf3", EDGE: "#7d8590", GRID: "#2d333b", SHADE: "#21262d", ABSENT: "#373e47"}
_DARK |= {OURS: "#58a6ff", PEER: "#768390", ORANGE: "#f0883e", GREEN: "#3fb68b"}
_DARK_RAMP = ("#fde725", "#cae11f", "#95d840", "#65cb5e", "#3dbc74", "#24aa83", "#1f978b", "#25848e")
_DARK |= dict(zip(RAMP, _DARK_RAMP, strict=True))


def save_svg(figure: Any, path: Path, *, last_line: str = "") -> None:
    """Write a figure as SVG with its own background, which is dark for readers who prefer dark pages.

    Call this function inside `matplotlib.rc_context(STYLE)`. Identical figures produce identical files.

    Args:
        figure: a matplotlib figure.
        path: path of the SVG file.
        last_line: an XML comment.
    """
    figure.patch.set_gid("ground")
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue().replace("</style>", f"{_dark_rules(written.getvalue())}</style>", 1)
    lines = [line.rstrip() for line in text.splitlines()]
    path.write_text("\n".join([*lines, *([last_line] if last_line else [])]) + "\n")


def _dark_rules(svg: str) -> str:
    """Return CSS that replaces the colors of an SVG on dark pages.

    The rules select elements by the colors in `style` attributes, which still apply in a viewer that ignores
    the rules.
    """
    rules = [f"#ground path {{fill: {_DARK_GROUND} !important}}"]
    for light, dark in _DARK.items():
        for attribute in ("fill", "stroke"):
            if (found := f"{attribute}: {light}") in svg:
                rules.append(f'[style*="{found}"] {{{attribute}: {dark} !important}}')
    return "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
