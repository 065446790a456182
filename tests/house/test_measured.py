"""Measured numbers on the pages are those of the result files that the page links."""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from typing import Any

import pytest
from pages import ROOT

from pyengine.cli.wires import WIRES

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="the sdist has no result files")

# Row of docs/kernels.md: which kind of file, and which case in it.
KERNELS = {
    "`pack_`": ("pack", "pack fp32 -> bf16 x scale, 8 tensors"),
    "`unpack_`": ("pack", "unpack bf16 -> fp32, 8 tensors"),
    "`accumulate_`, first": ("accumulate", "acc = s*bf16 (first), 8 tensors"),
    "`accumulate_`": ("accumulate", "acc += s*bf16, 8 tensors"),
    "`accumulate_cast_`": ("accumulate", "bf16 wire = (acc + bf16) * s, 8 tensors"),
    "`unscale_norm`": ("unscale_norm", "check+norm bf16 read only, 8 tensors"),
    "`unscale_norm`, fp32": ("unscale_norm", "check+norm fp32 read only, 8 tensors"),
    "`ExactSum.deposit_`, first": ("exact", "first deposit of bf16, 8 tensors"),
    "`ExactSum.deposit_`": ("exact", "later deposit of bf16, 8 tensors"),
    "`ExactSum.align_`": ("exact", "align, every block by one bin"),
    "`ExactSum.round_`": ("exact", "round to fp32"),
}
# The same of the README's table of kernels.
README_KERNELS = {
    "fp32 sum = bf16": ("accumulate", "acc = s*bf16 (first), 8 tensors"),
    "fp32 sum += bf16": ("accumulate", "acc += s*bf16, 8 tensors"),
    "fp32 sum += bf16, 400 tensors": ("accumulate", "acc += s*bf16, 400 tensors"),
    "bf16 wire = (sum + bf16) × s, checked": ("accumulate", "bf16 wire = (acc + bf16) * s, 8 tensors"),
    "fp32 → bf16 × s": ("pack", "pack fp32 -> bf16 x scale, 8 tensors"),
    "fp32 → fp16 × s": ("pack", "pack fp32 -> fp16 x scale, 8 tensors"),
    "flatten fp32": ("pack", "pack fp32 -> fp32, 8 tensors"),
    "unscale + check + norm, fp32": ("unscale_norm", "unscale+check+norm fp32 in place, 8 tensors"),
    "check + norm, read only, fp32": ("unscale_norm", "check+norm fp32 read only, 8 tensors"),
    "check + norm, read only, bf16": ("unscale_norm", "check+norm bf16 read only, 8 tensors"),
    "exact sum += bf16": ("exact", "later deposit of bf16, 8 tensors"),
    "exact sum += fp32": ("exact", "later deposit of fp32, 8 tensors"),
}
# Row of the table of shared memory: the variant.
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


def _case(page: str, kind: str, case: str) -> dict[str, Any]:
    (row,) = [row for row in _linked(page, kind)["rows"] if row["case"] == case]
    return row


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


def test_shares_of_the_roof_are_those_of_the_result_files():
    page = "docs/kernels.md"
    said = {op: cells[-1] for op, cells in _table(page, "share of the roof").items()}
    rows = {op: _case(page, *where) for op, where in KERNELS.items()}
    assert said == {op: f"{100 / row['times_roof']:.0f} %" for op, row in rows.items()}


def test_kernels_of_the_readme_are_those_of_the_result_files():
    rows = {name: _case("README.md", *where) for name, where in README_KERNELS.items()}
    assert _table("README.md", "× torch") == {
        name: [f"{row['times_roof']:.2f}", _short(row["times_torch"])] for name, row in rows.items()
    }


def test_what_an_engine_costs_is_that_of_the_result_files():
    low = {
        (world, phase, kind): row[phase]["min_ms"]
        for world in (2, 4)
        for kind, row in _linked("docs/wires.md", f"engine-{world}")["rows"].items()
        for phase in ("make", "window")
    }

    def pair(world: int, phase: str, digits: int) -> list[str]:
        return [f"{low[world, phase, kind]:.{digits}f}" for kind in ("shared memory", "process group")]

    said = (
        "at best {} instead of {} ms on two ranks, and {} instead of {} ms on four, on two cores, for "
        "windows of {} instead of {} and {} instead of {} ms"
    ).format(*pair(2, "make", 1), *pair(4, "make", 0), *pair(2, "window", 1), *pair(4, "window", 0))
    assert said in (ROOT / "docs/wires.md").read_text()


def test_what_shared_memory_leaves_of_a_sync_is_that_of_the_result_files():
    expected: dict[str, list[str]] = {row: [] for row in SHARED_VARIANTS}
    for world in (2, 4):
        cases = _linked("docs/wires.md", f"shared-{world}")["cases"]
        for case in ("gpt:fp32", "gpt0:fp32"):
            ends = {v: row["last_p50_ms"] + row["epilogue_p50_ms"] for v, row in cases[case].items()}
            for row, variant in SHARED_VARIANTS.items():
                expected[row].append(f"{ends[variant] - ends['floor']:.0f}")
    assert _table("docs/wires.md", "4 ranks, gradients alone") == expected


def test_what_wires_do_to_training_is_that_of_the_result_file():
    models = _linked("docs/wires.md", "convergence")["models"]
    expected: dict[str, list[str]] = {}
    for model, factor, digits in (("gpt", 1, 3), ("cnn", 100, 2)):
        exact = models[model]["fp32"]["finals"]
        for wire in WIRES.keys() & models[model].keys():
            row = models[model][wire]
            over = [a - b for a, b in zip(row["finals"], exact, strict=True)]
            cells = [statistics.mean(row["finals"]), statistics.mean(over), max(over)]
            texts = [
                f"{factor * value:{sign}.{digits}f}"
                for value, sign in zip(cells, ("", "+", "+"), strict=True)
            ]
            expected.setdefault(f"`{wire}`", []).extend(texts)
    assert _table("docs/wires.md", "of one seed at most") == expected
