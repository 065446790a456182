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

RESULTS, STUDY = newest(BENCHMARKS / "results"), render_study.newest()
DIGESTS = {plot.name: digest(plot, RESULTS) for plot in PLOTS if plot.figures(RESULTS)}
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


def test_the_readme_has_the_figures_of_the_newest_files():
    base, gbit, wires = (RESULTS[name] for name in ("base", "gbit", "gbit-wires"))
    sent = [base.rows[name]["sent_mb"] for name in ("engine", "ddp")]
    figures = [
        "{:.0f} MB instead of {:.0f} MB".format(*sent),
        f"{base.ratio('engine', CONTROL[0]):.2f} times on loopback",
        f"{gbit.ratio('engine', CONTROL[0]):.2f} times over 1 Gbit/s",
        f"{wires.ratio('engine_bf16', CONTROL[0]):.2f} times as long with a bf16 wire",
        f"{wires.ratio('engine_int8_ef', CONTROL[0]):.2f} times with int8 and error feedback",
    ]
    readme = (ROOT / "README.md").read_text()
    assert [figure for figure in figures if figure not in readme] == []
