"""What a study says in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from study_records import STEPS, analysed, ended, made, with_stall

from pyengine.cli.study.advice import advise, duration, percent
from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.store import Record


def said(
    records: Sequence[Record], impossible: dict[Cell, str] | None = None, **changes: Any
) -> dict[str, str]:
    """Return the advice by title, with ordinary spaces."""
    found = advise(analysed(records, **changes), records, impossible or {})
    return {one.title: one.text.replace("\u00a0", " ") for one in found}


def waits(share: float, step_s: float) -> list[float]:
    return [0.0] * WARM_UP_STEPS + [share * step_s] * STEPS


def test_smallest_time_is_named_with_the_slowest() -> None:
    text = said([made(1, 64, step_s=0.5), made(2, 64, step_s=0.25)])["Smallest time"]
    assert (
        text == "2 workers × batch 64 reaches 75.0 % in 7.00 s; the slowest, 1 worker × batch 64, in 11.00 s."
    )


def test_cells_that_miss_the_goal_are_counted() -> None:
    text = said([made(1, 64, accuracy=[(19, 0.9)]), made(2, 64)], goal=0.8)["Smallest time"]
    assert text == "1 worker × batch 64 reaches 80.0 % in 7.00 s. 1 of 2 cells did not reach it in every run."


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"goal": 0.9}, "no cell reached 90.0 % in every run"), ({}, "no accuracy was taken")],
    ids=["goal missed", "no accuracy"],
)
def test_throughput_stands_in_for_a_time_that_is_not_there(changes: dict[str, float], why: str) -> None:
    points = [(19, 0.75)] if changes else []
    found = said([made(1, 64, step_s=0.5, accuracy=points), made(2, 64, accuracy=points)], **changes)
    assert (
        found["Highest throughput"]
        == f"2 workers × batch 64: 256 samples/s. There is no time to an accuracy: {why}."
    )


def test_best_accuracy_names_what_is_as_good_and_quicker() -> None:
    best = [
        made(1, 64, repeat=repeat, accuracy=[(19, value)]) for repeat, value in enumerate((0.8, 0.9, 0.95))
    ]
    text = said([*best, made(2, 64, step_s=0.125, accuracy=[(19, 0.85)])])["Best accuracy"]
    assert text == (
        "1 worker × batch 64: 90.0 % after 7.00 s. Within its repeats' range, and quicker: 2 workers × "
        "batch 64, 85.0 % after 5.00 s."
    )


def test_best_accuracy_beyond_the_range_of_repeats_stands_alone() -> None:
    text = said([made(1, 64, accuracy=[(19, 0.9)]), made(2, 64, step_s=0.125)])["Best accuracy"]
    assert text == "1 worker × batch 64: 90.0 % after 7.00 s."


TOO_SMALL = [
    (0.5, 0.0, "slower than 1 worker, efficiency 25.0 %"),
    (0.25, 0.0, ""),
    (0.125, 0.4, "40.0 % of a step waits for gradients"),
    (0.125, 0.2, ""),
]


@pytest.mark.parametrize(("step_s", "share", "reasons"), TOO_SMALL)
def test_sub_batch_is_too_small_for_a_reason(step_s: float, share: float, reasons: str) -> None:
    found = said([made(1, 64, step_s=0.25), made(2, 64, step_s=step_s, sync_s=waits(share, step_s))])
    text = (
        f"2 workers × batch 64, 32 samples a worker: {reasons}. What helps: a larger batch, or fewer workers."
    )
    assert found.get("Sub-batch too small") == (text if reasons else None)


def test_sub_batch_is_not_judged_where_cores_are_shared() -> None:
    found = said([made(1, 64, step_s=0.25), made(2, 64, step_s=0.5)], cores=1)
    assert "Sub-batch too small" not in found
    assert found["Shared cores"].startswith("2 workers share 1 core:")


def test_prediction_says_what_it_rests_on() -> None:
    text = said([made(1, 64, step_s=0.5), made(2, 64, step_s=0.375)])["More workers"]
    assert "Amdahl's law, if 50.0 % does not divide, predicts 1.6x on 4 and 1.8x on 8 workers" in text
    assert "never more than 2.0x" in text
    assert text.endswith("fitted to 1 worker count above 1, which says nothing about how well it fits.")


def test_stalls_failures_and_impossible_cells_are_named() -> None:
    records = [with_stall(made(1, 64), 7, 4.25), ended(2, 64)]
    found = said(records, {Cell(3, 64): "64 is not a multiple of 3"})
    assert "step 7 of 1 worker × batch 64, repeat 1: 4.25 s instead of 250 ms" in found["Stalls"]
    assert (
        "1 run did not end well: 2 workers × batch 64. 1 cell cannot be run: 3 workers × batch 64."
        in (found["Not measured"])
    )


def test_runs_of_a_busy_machine_are_counted() -> None:
    text = said([made(1, 64, busy=0.5), made(2, 64, busy=0.05)])["The machine was not quiet"]
    assert text.startswith(
        "1 of 2 runs began while other programs used more than 10 % of the processors (up to 50.0 %)"
    )


def test_quiet_study_says_nothing_of_it() -> None:
    found = said([made(1, 64), made(2, 64, step_s=0.125)])
    assert set(found) == {"Smallest time", "Best accuracy", "More workers"}


def test_study_without_a_good_run_says_so() -> None:
    assert list(said([ended(1, 64)])) == ["Nothing was measured"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.00025, "0.25 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (90.0, "1.5 min")]
)
def test_duration_has_a_unit_that_suits_it(value: float, text: str) -> None:
    assert duration(value).replace("\u00a0", " ") == text


def test_percent_does_not_break() -> None:
    assert percent(0.985) == "98.5\u00a0%"
