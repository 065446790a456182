"""Plots are readable on light and on dark pages, and the same figures give the same SVG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyengine.cli import plot_style

matplotlib = pytest.importorskip("matplotlib")


def luminance(colour: str) -> float:
    """Return the relative luminance of a hex color, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("name", "least"), [("INK", 7.0), ("OURS", 4.5), ("PEER", 3.0), ("ORANGE", 3.0), ("GREEN", 3.0)]
)
def test_a_color_has_contrast_on_light_and_on_dark_ground(name, least):
    light = getattr(plot_style, name)
    assert contrast(light, "#ffffff") >= least
    assert contrast(plot_style._DARK[light], plot_style._DARK_GROUND) >= least


@pytest.mark.parametrize("colour", plot_style.RAMP)
def test_a_step_of_the_ramp_has_contrast_on_dark_ground(colour):
    assert contrast(plot_style._DARK[colour], plot_style._DARK_GROUND) >= 3.0


def drawn(path: Path) -> str:
    figure_of: Any = pytest.importorskip("matplotlib.figure")
    with matplotlib.rc_context(plot_style.STYLE):
        figure = figure_of.Figure(figsize=(2, 2))
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=plot_style.OURS)
        axes.set_title("a title")
        plot_style.save_svg(figure, path, last_line="<!-- the end -->")
    return path.read_text()


def test_an_svg_has_text_and_a_rule_for_each_of_its_colors(tmp_path):
    svg = drawn(tmp_path / "plot.svg")
    dark = plot_style._DARK[plot_style.OURS]
    assert ">a title</text>" in svg
    assert f'[style*="stroke: {plot_style.OURS}"] {{stroke: {dark} !important}}' in svg
    assert plot_style.ORANGE not in svg
    assert '<g id="ground">' in svg and f"#ground path {{fill: {plot_style._DARK_GROUND}" in svg
    assert svg.endswith("</svg>\n<!-- the end -->\n")


def test_the_same_figure_gives_the_same_svg(tmp_path):
    assert drawn(tmp_path / "one.svg") == drawn(tmp_path / "two.svg")
