"""Pages and plots that `make numbers` writes show the newest result files."""

from __future__ import annotations

import re
import sys

import pytest
from pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
if not (BENCHMARKS / "results").exists():
    pytest.skip("the sdist has no result files", allow_module_level=True)
sys.path.append(str(BENCHMARKS))

import render_numbers
import render_study
from _launches import LAUNCHES
from _peer_results import CONTROL, newest
from _plots import PLOTS, digest

from pyengine.cli.main import build_parser
from pyengine.cli.study.arguments import settings
from pyengine.cli.study.grid import cells

RESULTS = newest(BENCHMARKS / "results")


@pytest.mark.parametrize("name", render_numbers.PAGES)
def test_a_page_shows_the_newest_files(name):
    page = (ROOT / name).read_text()
    assert "numbers:begin" in page
    assert page == render_numbers.rendered(page, RESULTS), "`make numbers` writes the page"


def test_every_launch_is_on_the_page():
    page = (ROOT / "docs" / "numbers.md").read_text()
    named = {one.name for one in LAUNCHES} & RESULTS.keys()
    assert [name for name in named if f"results/{RESULTS[name].path.name})" not in page] == []
    assert set(render_numbers.TABLES | render_numbers.BLOCKS) == set(re.findall(r"numbers:begin (\S+)", page))


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_plot_shows_the_newest_files(plot):
    path = ROOT / "docs" / plot.name
    assert path.exists() == bool(plot.figures(RESULTS))
    if path.exists():
        assert path.read_text().endswith(f"{digest(plot, RESULTS)}\n"), "`make numbers` draws the plot"


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


# ---- docs/study.md ----

STUDY = render_study.newest()


def test_the_page_of_the_study_shows_the_newest_file():
    page = (ROOT / render_study.PAGE).read_text()
    assert "study:begin" in page
    assert page == render_study.rendered(page, STUDY), "`make numbers` writes the page"


@pytest.mark.parametrize("name", render_study.PLOTS.values())
def test_a_plot_of_the_study_shows_the_newest_file(name):
    path = ROOT / "docs" / name
    assert path.read_text().endswith(f"{render_study.digest(STUDY)}\n"), "`make numbers` draws the plot"


def test_the_command_on_the_page_makes_the_study_that_is_shown():
    page = (ROOT / render_study.PAGE).read_text()
    (command,) = re.findall(
        r"^python -m pyengine (study .*)\n```\n\n<!-- study:begin -->", page, re.MULTILINE
    )
    asked = settings(build_parser().parse_args(command.split()))
    header, records, _ = render_study.read(STUDY)
    assert {name: header[name] for name in asked.binding()} == asked.binding()
    assert {(run.cell, run.repeat) for run in records} == {
        (cell, repeat) for cell in cells(asked) for repeat in range(asked.repeats)
    }
