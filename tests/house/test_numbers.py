"""Pages and plots that `make numbers` writes, and the README, show the newest result files."""

from __future__ import annotations

import sys

import pytest
from pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
if not (BENCHMARKS / "results").exists():
    pytest.skip("the sdist has no result files", allow_module_level=True)
sys.path.append(str(BENCHMARKS))

import render_numbers
import render_study
from _peer_results import CONTROL, newest
from _plots import PLOTS, digest

FILES = BENCHMARKS / "results"
RESULTS, STUDY = newest(FILES), render_study.newest()
MEAN = next(plot for plot in PLOTS if plot.name == "mean.svg").figures(FILES)
DIGESTS = {plot.name: digest(plot, FILES) for plot in PLOTS if plot.figures(FILES)}
DIGESTS |= dict.fromkeys(render_study.PLOTS.values(), render_study.digest(STUDY))


@pytest.mark.parametrize("name", render_numbers.PAGES)
def test_a_page_shows_the_newest_files(name):
    page = (ROOT / name).read_text()
    assert "numbers:begin" in page
    assert page == render_numbers.rendered(page, RESULTS), "`make numbers` writes the page"


def test_the_page_of_the_study_shows_the_newest_file():
    page = (ROOT / render_study.PAGE).read_text()
    assert "study:begin" in page
    assert page == render_study.rendered(page, STUDY), "`make numbers` writes the page"


@pytest.mark.parametrize("name", DIGESTS)
def test_a_plot_shows_the_newest_files(name):
    assert (ROOT / "docs" / name).read_text().endswith(f"{DIGESTS[name]}\n"), "`make numbers` draws the plot"


def test_every_plot_is_drawn_from_result_files():
    assert {path.name for path in (ROOT / "docs").glob("*.svg")} == set(DIGESTS)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_plot_is_small_and_has_colors_for_dark_pages(name):
    plot = (ROOT / "docs" / name).read_text()
    assert len(plot) < 60_000
    assert "<text " in plot and "prefers-color-scheme: dark" in plot


def test_the_readme_has_the_figures_of_the_newest_files():
    states = RESULTS["sharded-states"]
    sent = {name: f"{num / 1e6:.0f} MB" for name, num in MEAN["bytes"].items()}
    assert sent["no_sync"] == sent["fp32"]
    ratio = {
        name: f"{states.ratio(name, CONTROL[0]):.2f} times" for name in states.rows if name != CONTROL[0]
    }
    figures = [
        f"one reduction per window, {sent['fp32']} for a GPT",
        f"DDP without `no_sync` sends {sent['ddp']} for 8 micro-batches",
        "wrong by {ddp:.0%} in a short".format(**MEAN["errors"]["short"]).replace("%", " %"),
        "by {ddp:.0%} with unequal".format(**MEAN["errors"]["tokens"]).replace("%", " %"),
        f"differences of {100 * states.noise:.0f} % are noise",
        f"{ratio['engine']} as long with `GradSync`",
        f"a window takes {ratio['engine_zero_redundancy']} as long with `GradSync`",
        f"and {ratio['zero_redundancy']} as long with DDP",
        f"reduction per window, it takes {ratio['attach_fsdp2_gathered']}",
    ]
    readme = (ROOT / "README.md").read_text()
    assert [figure for figure in figures if figure not in readme] == []
