"""What `make bench` writes: pages and plots are what the newest result files say, and these say what they
would on any machine. Ratios only, with wide margins; never times.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
if not (BENCHMARKS / "results").exists():
    pytest.skip("the sdist has no result files", allow_module_level=True)
sys.path.append(str(BENCHMARKS))

import _ahead
import render_numbers
from _launches import LAUNCHES
from _peer_results import CONTROL, Measured, newest
from _plots import PLOTS, digest

RESULTS = newest(BENCHMARKS / "results")
TIMED = {name: one for name, one in RESULTS.items() if one.launch["kind"] == "time"}
DEFERRED = ("no_sync", "no_sync_view", "accelerate", "fabric", "trainer", "engine", "attach", "engine_bf16")


def made(rows: dict[str, list[float]], **launch: Any) -> Measured:
    """Return a launch with these times of whole windows."""
    phases = ("window", "sync", "early", "epilogue")
    about = {"work": "GPT fp32", "network": "loopback", "parameters": 1, "tensors": 1}
    base = {"name": "base", "kind": "time", "dtype": "fp32", "model": "gpt", "accumulate": 8, "world": 2}
    base["rounds"] = _ahead.LEAST_WINDOWS
    card = {"cores": 2, "cpu": "a", "isa": "b", "kernel": "c", "python": "d", "torch": "e", "malloc": "f"}
    content = {
        "machine": card,
        "launch": base | launch,
        "about": about,
        "missing": ["accelerate"],
        "variants": {n: {"label": n, "is_ours": n == "engine"} for n in (*rows, "accelerate")},
        "rows": {n: {"times": dict.fromkeys(phases, times)} for n, times in rows.items()},
        "seconds": 60,
    }
    return Measured(Path("2026-01-02-peers-base.json"), content)


LEVEL = {"floor": [90.0] * 4, CONTROL[0]: [100.0, 101, 99, 100], CONTROL[1]: [100.0, 100, 100, 100]}


@pytest.mark.parametrize("name", render_numbers.PAGES)
def test_a_page_is_what_the_newest_files_say(name):
    page = (ROOT / name).read_text()
    assert "numbers:begin" in page
    assert page == render_numbers.rendered(page, RESULTS), "`make numbers` writes it anew"


def test_every_launch_has_a_place_on_the_page():
    page = (ROOT / "docs" / "numbers.md").read_text()
    named = {f"launch-{one.name}" if one.kind == "time" else one.kind for one in LAUNCHES}
    assert named <= set(re.findall(r"numbers:begin (\S+)", page))


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_plot_is_drawn_from_the_newest_files(plot):
    path = ROOT / "docs" / plot.name
    assert path.exists() == bool(plot.figures(RESULTS))
    assert not path.exists() or path.read_text().endswith(f"{digest(plot, RESULTS)}\n"), (
        "`make numbers` draws it"
    )


def test_a_block_without_its_files_stays_as_it_is():
    page = "<!-- numbers:begin launch-base -->\nkept\n<!-- numbers:end -->\n"
    assert render_numbers.rendered(page, {}) == page
    assert "kept" not in render_numbers.rendered(page, {"base": made(LEVEL)})


def test_a_peer_that_is_not_installed_has_a_row_that_says_so():
    rows = render_numbers.launch_table(made(LEVEL))
    assert [row for row in rows if row.startswith("| accelerate | not installed |")]


def test_a_peer_ahead_without_a_reason_shows_as_such():
    results = {"base": made(LEVEL | {"engine": [120.0, 121, 120, 119]})}
    (row,) = [one for one in render_numbers.ahead(results) if "1.20 × no_sync_view |" in one]
    assert "| **engine** |" in row and _ahead.UNEXPLAINED in row


def test_a_peer_ahead_by_less_than_the_noise_is_not_told_of():
    results = {"base": made(LEVEL | {"engine": [101.0, 102, 100, 101]})}
    assert not [row for row in render_numbers.ahead(results) if row.startswith("|")]


def test_a_launch_of_few_windows_says_nothing_of_who_is_ahead():
    rows = LEVEL | {"engine": [120.0, 121, 120, 119]}
    assert render_numbers.ahead({"base": made(rows)})
    assert not render_numbers.ahead({"base": made(rows, rounds=_ahead.LEAST_WINDOWS - 1)})


def test_a_launch_that_another_machine_took_is_named_beside_its_card():
    results = {name: made(LEVEL) for name in ("base", "gbit", "slow")}
    one_machine = render_numbers.machine(results)[0]
    results["slow"].content["machine"] = results["slow"].content["machine"] | {"isa": "another"}
    (said,) = render_numbers.machine(results)
    assert "`slow` on 2 cores of a (another)" in said and "`base`" not in said
    assert "`" not in one_machine


def test_a_plot_of_other_figures_ends_otherwise():
    (plot, _), rows = PLOTS, LEVEL | {"engine": [95.0] * 4}
    results = {name: made(rows) for name in ("gbit", "gbit-wires", "base", "wires")}
    other = copy.deepcopy(results)
    other["gbit"].rows["engine"]["times"]["sync"][:] = [99.0] * 4
    assert digest(plot, results) == digest(plot, copy.deepcopy(results)) != digest(plot, other)


# ---- what holds on any machine ----


def test_the_control_pair_reads_one():
    found = {name: one.ratio(*CONTROL) for name, one in TIMED.items() if set(CONTROL) <= set(one.rows)}
    assert all(0.9 < ratio < 1.1 for ratio in found.values()), found


def test_a_slow_link_makes_one_exchange_a_window_pay():
    found = {
        (launch, name): one.ratio(name, "ddp")
        for launch, one in TIMED.items()
        if one.launch["rate"] == 1000 and "ddp" in one.rows
        for name in DEFERRED
        if name in one.rows
    }
    assert all(ratio < 0.75 for ratio in found.values()), found


def test_windows_of_the_engine_are_not_far_from_those_of_no_sync():
    found = {
        (launch, name): one.ratio(name, CONTROL[0])
        for launch, one in TIMED.items()
        if one.launch["dtype"] == "fp32"
        for name in ("engine", "attach")
        if {name, CONTROL[0]} <= set(one.rows)
    }
    assert all(ratio < 1.5 for ratio in found.values()), found


SENT = {"ddp": (6.0, 9.0), "engine": (0.95, 1.05), "attach": (0.95, 1.06), "engine_bf16": (0.45, 0.56)}
SENT |= {"engine_int8_ef": (0.2, 0.35), "no_sync_bf16": (0.45, 0.56)}


def test_bytes_are_those_of_the_wire():
    found = {
        (launch, name): (one.rows[name]["sent_mb"] / one.rows[CONTROL[0]]["sent_mb"], SENT[name])
        for launch, one in TIMED.items()
        if one.launch["dtype"] == "fp32" and one.launch["accumulate"] == 8 and one.launch["model"] == "gpt"
        for name in SENT
        if name in one.rows and "sent_mb" in one.rows[name]
    }
    assert all(low < ratio < high for ratio, (low, high) in found.values()), found


# fp32: 24 bits; bf16 and what is narrower: 8, of a gradient that is cast once or twice.
ERRORS = {
    "engine": 1e-5,
    "attach": 1e-5,
    "engine_exact_slots": 1e-5,
    "no_sync_view": 1e-5,
    "engine_shared": 1e-5,
}
ERRORS |= {"engine_bf16": 8e-3, "no_sync_bf16": 8e-3, "engine_int8_ef": 5e-2}


def test_gradients_are_as_near_to_float64_as_their_wires_are_wide():
    rows = RESULTS["truth"].rows if "truth" in RESULTS else {}
    found = {name: (rows[name]["error"], limit) for name, limit in ERRORS.items() if name in rows}
    assert all(error < limit for error, limit in found.values()), found


def test_all_that_sync_end_with_the_same_loss():
    rows = RESULTS["truth"].rows if "truth" in RESULTS else {}
    losses = {
        name: row["end_loss"] for name, row in rows.items() if "error" in row and name != "no_sync_powersgd"
    }
    assert not losses or max(losses.values()) < 1.01 * min(losses.values()), losses
