"""Measured numbers on the pages are those of the result files that the page links."""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from typing import Any

import pytest
from pages import ROOT

from pyengine.wire.named import WIRES

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="the sdist has no result files")

KERNELS = ("pack", "accumulate", "unscale_norm", "exact")
# Row of the table of shared memory, and its variant.
SHARED_VARIANTS = {
    "DDP + `no_sync`, bucket views": "no_sync_view",
    "`GradSync`": "engine",
    "`GradSync(shared_memory=True)`": "engine_shared",
    "`attach`": "attach",
    "`attach(shared_memory=True)`": "attach_shared",
}


@cache
def _linked(page: str, kind: str) -> Any:
    """Return the result file of a kind that a page links."""
    (name,) = set(re.findall(rf"results/(\d{{4}}-\d\d-\d\d-{kind}\.json)\)", (ROOT / page).read_text()))
    return json.loads((RESULTS / name).read_text())


def _table(page: str, last_column: str) -> dict[str, list[str]]:
    """Return the rows of the page's table whose last column has this title, by their first cell."""
    text = (ROOT / page).read_text()
    (rows,) = re.findall(
        rf"^\|.*\| {re.escape(last_column)} \|\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return {first: rest for first, *rest in cells}


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def test_times_of_kernels_are_those_of_the_result_files():
    rows = [row for kind in KERNELS for row in _linked("docs/kernels.md", kind)["rows"]]
    timed = [row for row in rows if row.get("times_roof") and row.get("times_torch")]
    measured = [[f"{row['times_roof']:.2f}", _short(row["times_torch"])] for row in timed]
    shown = _table("docs/kernels.md", "× torch")
    assert shown and {name: cells for name, cells in shown.items() if cells not in measured} == {}


def test_what_shared_memory_leaves_of_a_sync_is_that_of_the_result_files():
    expected: dict[str, list[str]] = {row: [] for row in SHARED_VARIANTS}
    for world in (2, 4):
        cases = _linked("docs/wires.md", f"shared-{world}")["cases"]
        ends = {v: row["last_p50_ms"] + row["epilogue_p50_ms"] for v, row in cases["gpt:fp32"].items()}
        for row, variant in SHARED_VARIANTS.items():
            expected[row].append(f"{ends[variant] - ends['floor']:.0f}")
    assert _table("docs/wires.md", "4 ranks") == expected


def test_what_wires_do_to_training_is_that_of_the_result_file():
    models = _linked("docs/wires.md", "convergence")["models"]
    text = (ROOT / "docs" / "wires.md").read_text()
    for model, factor, shown in (
        ("gpt", 1, "{:.3f} over `fp32` and {:.3f} to {:.3f}"),
        ("cnn", 100, "{:.2f} % and {:.2f} to {:.2f} %"),
    ):
        rows = models[model]
        means = {wire: factor * statistics.mean(rows[wire]["finals"]) for wire in WIRES.keys() & rows.keys()}
        exact = means.pop("fp32")
        assert shown.format(exact, min(means.values()), max(means.values())) in text


def test_windows_on_a_gpu_are_those_of_the_result_files():
    cases = _linked("docs/gpu.md", "captured-cuda")["cases"]
    names = ("floor", "no_sync_view", "engine", "attach")
    measured = [
        [f"{cases[case][name + end]['window_p50_ms']:.1f}" for name in names]
        for case in ("gpt124-short:bf16", "small:fp32")
        for end in ("", ", captured")
    ]
    assert [*_table("docs/gpu.md", "`attach`").values()] == measured
    rows = _linked("docs/gpu.md", "step-cuda")["cases"]["gpt124:fp32"]
    ours, of_ddp = rows["engine"], rows["no_sync_view"]
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert f"{ours['window_p50_ms']:.1f} with `GradSync`, {of_ddp['window_p50_ms']:.1f} with DDP" in text
    assert f"needs {1 - ours['peak_mb'] / of_ddp['peak_mb']:.0%} less".replace("%", " %") in text
