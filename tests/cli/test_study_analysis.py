"""Results of a study: exact for synthetic runs; stalls are left out and listed, shared cores are marked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from study_records import STEPS, analysed, ended, made, with_stall

from pyengine.cli.noise import Range, duration
from pyengine.cli.study.analysis import curve, recommend, stalls, sync_share, time_to
from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.report import row
from pyengine.cli.study.store import Record


def same(value: float) -> Range:
    return Range(value, value, value)


def test_speed_up_and_efficiency_are_against_one_worker_with_the_same_batch():
    cells = analysed([made(1, 64, step_s=0.5), made(2, 64, step_s=0.25), made(4, 64, step_s=0.25)]).cells
    assert [cells[Cell(workers, 64)].speed_up for workers in (1, 2, 4)] == [same(1.0), same(2.0), same(2.0)]
    assert [cells[Cell(workers, 64)].efficiency for workers in (1, 2, 4)] == [same(1.0), same(1.0), same(0.5)]


def test_without_one_worker_there_is_no_speed_up():
    figures = analysed([ended(1, 64), made(2, 64)]).cells[Cell(2, 64)]
    assert (figures.speed_up, figures.efficiency) == (None, None)
    assert figures.samples_s == same(256.0)


def test_repeats_give_a_median_and_a_range():
    records = [made(1, 64, repeat=repeat, step_s=step_s) for repeat, step_s in enumerate((0.25, 0.5, 1.0))]
    figures = analysed(records).cells[Cell(1, 64)]
    assert (figures.samples_s, figures.batches_s, figures.runs) == (Range(128, 64, 256), Range(2, 1, 4), 3)


def test_repeat_that_failed_is_named_and_the_others_count():
    analysis = analysed([made(1, 64), replace(ended(1, 64), repeat=1), ended(2, 64, "stalled")])
    assert {cell: figures.runs for cell, figures in analysis.cells.items()} == {Cell(1, 64): 1}
    assert [record.key for record in analysis.ended] == [(1, 64, 1), (2, 64, 0)]


def test_share_that_waits_is_of_the_measured_steps():
    record = made(2, 64, step_s=0.25, sync_s=[0.5] * WARM_UP_STEPS + [0.0625] * STEPS)
    assert sync_share(record) == 0.25


def test_memory_is_of_the_largest_worker_and_processors_are_of_the_mean():
    record = made(2, 64, peak_rss_bytes=[2**20, 2**21], cpu_share=[0.5, 1.0])
    figures = analysed([record]).cells[Cell(2, 64)]
    assert (figures.memory_bytes, figures.cpu_share) == (same(2.0**21), same(0.75))


def test_stall_is_found_and_left_out():
    record = with_stall(made(1, 64, step_s=0.25), 7, 4.25)
    (stall,) = stalls(record)
    assert (stall.step, stall.seconds, stall.usual_s) == (7, 4.25, 0.25)
    analysis = analysed([record])
    assert analysis.cells[Cell(1, 64)].samples_s == same(256.0)
    assert [stall.step for stall in analysis.stalls] == [7]
    assert curve(record).seconds == [0.0, 3 + 5 * 0.25, 3 + 16 * 0.25]  # the stall counts as a usual step


@pytest.mark.parametrize(
    ("step", "seconds"),
    [(0, 100.0), (WARM_UP_STEPS - 1, 100.0), (7, 0.75)],
    ids=["first step", "last of the warm-up", "three medians"],
)
def test_step_is_no_stall(step, seconds):
    assert stalls(with_stall(made(1, 64, step_s=0.25), step, seconds)) == []


def test_wide_spread_makes_a_long_step_usual():
    # median 1.25, median deviation 0.75: the limit is 1.25 + 10 × 1.4826 × 0.75 = 12.37
    restless = made(1, 64, seconds=[1.0] * WARM_UP_STEPS + [0.5, 2.0] * (STEPS // 2))
    assert stalls(with_stall(restless, 4, 12.0)) == []
    assert len(stalls(with_stall(restless, 4, 13.0))) == 1


def test_time_to_an_accuracy_is_that_of_the_first_evaluation_there():
    one = curve(made(1, 64, step_s=0.25))
    assert [time_to(one, goal) for goal in (0.125, 0.25, 0.5, 0.75)] == [0.0, 4.25, 4.25, 7.0]
    assert time_to(one, 0.8) is None


def test_goal_is_what_every_run_reaches_and_names_the_cell_that_sets_it():
    low = made(2, 64, accuracy=[(0, 0.125), (8, 0.5), (19, 0.375)])
    analysis = analysed([made(1, 64), low])
    assert (analysis.goal, analysis.goal_from) == (0.5, Cell(2, 64))
    assert analysis.cells[Cell(1, 64)].goal_s == same(4.25)


def test_goal_of_the_user_may_be_out_of_reach():
    analysis = analysed([made(1, 64), made(2, 64, accuracy=[(19, 0.875)])], goal=0.8)
    assert (analysis.goal, analysis.goal_from) == (0.8, None)
    assert [figures.goal_s for figures in analysis.cells.values()] == [None, same(7.0)]


@pytest.mark.parametrize("second", [[(8, 0.5), (19, 0.75)], [(19, None)]], ids=["below", "no accuracy"])
def test_a_cell_of_which_one_repeat_misses_the_goal_has_no_time(second):
    records = [made(1, 64, accuracy=[(19, 0.875)]), made(1, 64, repeat=1, accuracy=second)]
    assert analysed(records, goal=0.8).cells[Cell(1, 64)].goal_s is None


def test_without_accuracies_there_is_throughput_alone():
    analysis = analysed([made(1, 64, accuracy=[])])
    figures = analysis.cells[Cell(1, 64)]
    assert (analysis.goal, analysis.curves, figures.accuracy, figures.goal_s) == (None, {}, None, None)


def test_noise_scale_is_the_median_of_the_repeats_in_samples():
    runs = [
        made(2, 64, repeat=repeat, micro_batch=16, accumulate=2, noise_scale=scale, noise_spread=spread)
        for repeat, (scale, spread) in enumerate([(30.0, 4.0), (10.0, None), (20.0, 8.0)])
    ]
    figures = analysed(runs).cells[Cell(2, 64)]
    assert (figures.noise_scale, figures.noise_spread) == (Range(20, 10, 30), 6.0)
    assert (figures.global_batch, row(figures)[7]) == (64, "20 ± 6")


def test_a_repeat_without_a_noise_scale_leaves_the_cell_without():
    runs = [made(2, 64, noise_scale=30.0, noise_spread=4.0), made(2, 64, repeat=1)]
    figures = analysed(runs).cells[Cell(2, 64)]
    assert (figures.noise_scale, figures.noise_spread) == (None, None)
    assert row(figures)[7] == "–"


def test_accuracy_that_was_no_number_is_passed_over():
    record = made(1, 64, accuracy=[(0, 0.125), (8, None), (19, 0.5)])
    assert curve(record).accuracy == [0.125, 0.5]


@pytest.mark.parametrize(("threads", "cores", "shared"), [(1, 4, [8]), (2, 4, [4, 8]), (1, 1, [2, 4, 8])])
def test_more_threads_than_cores_are_marked(threads, cores, shared):
    analysis = analysed([made(workers, 64) for workers in (1, 2, 4, 8)], threads=threads, cores=cores)
    marked = [cell.workers for cell, figures in analysis.cells.items() if figures.is_oversubscribed]
    assert marked == shared


def repeats(workers: int, *step_s: float, **changes: Any) -> list[Record]:
    return [made(workers, 64, repeat=repeat, step_s=each, **changes) for repeat, each in enumerate(step_s)]


ONE, TWO, FOUR = "1 worker × batch 64", "2 workers × batch 64", "4 workers × batch 64"
TIME, NOISE = "time to 75.0 %", "Within noise of each other in"

# Seconds to the goal: 3 of warm-up, plus 16 steps. Samples per second: 64 divided by the time of a step.
RECOMMENDED = {
    "time beyond noise": (
        [*repeats(1, 0.5, 0.5), *repeats(2, 0.25, 0.3125)],
        Cell(2, 64),
        f"{TWO} (7.50 s, 7.00 s to 8.00 s) has the best {TIME}; the next one is {ONE} (11.00 s).",
    ),
    "time within noise": (
        [*repeats(1, 0.25, 0.375), *repeats(2, 0.25, 0.3125), *repeats(4, 0.5, 0.5)],
        None,
        f"{NOISE} {TIME}: {TWO} (7.50 s, 7.00 s to 8.00 s), {ONE} (8.00 s, 7.00 s to 9.00 s).",
    ),
    "time within noise of the third": (
        [*repeats(1, 0.25, 0.25), *repeats(2, 0.375, 0.375), *repeats(4, 0.25, 1.0)],
        None,
        f"{NOISE} {TIME}: {ONE} (7.00 s), {FOUR} (13.00 s, 7.00 s to 19.00 s).",
    ),
    "throughput beyond noise": (
        [*repeats(1, 0.5, 0.5, accuracy=[]), *repeats(2, 0.25, 0.25, accuracy=[])],
        Cell(2, 64),
        f"{TWO} (256 samples/s) has the best throughput; the next one is {ONE} (128 samples/s).",
    ),
    "throughput within noise": (
        [*repeats(1, 0.5, 0.25, accuracy=[]), *repeats(2, 0.25, 0.25, accuracy=[])],
        None,
        f"{NOISE} throughput: {TWO} (256 samples/s), {ONE} (192 samples/s, 128 samples/s to 256 samples/s).",
    ),
    "single run": (
        [*repeats(1, 0.5), *repeats(2, 0.25)],
        None,
        f"{TWO} (7.00 s) has the best {TIME}, but a single run does not show the noise: raise --repeats.",
    ),
    "single configuration": (repeats(1, 0.25, 0.25), Cell(1, 64), f"{ONE} (7.00 s) has the best {TIME}."),
    "nothing": ([ended(1, 64)], None, "Nothing was measured: the report gives the reasons."),
}


@pytest.mark.parametrize(("records", "best", "text"), RECOMMENDED.values(), ids=RECOMMENDED)
def test_only_a_configuration_beyond_noise_is_recommended(records, best, text):
    found = recommend(analysed(records))
    assert (found.best, found.text.replace("\u00a0", " ")) == (best, text)


def test_throughput_is_compared_where_no_configuration_reaches_the_goal():
    found = recommend(analysed([*repeats(1, 0.5, 0.5), *repeats(2, 0.25, 0.25)], goal=0.9))
    assert found.best == Cell(2, 64)
    assert "best throughput" in found.text


@pytest.mark.parametrize(
    ("one", "two", "is_within_noise"),
    [((0.25, 0.5), (0.25, 0.125), True), ((0.5, 0.5), (0.25, 0.125), False), ((0.5,), (0.125, 0.125), True)],
    ids=["overlap", "beyond noise", "single run"],
)
def test_speed_up_within_the_noise_of_repeats_is_marked_in_the_table(one, two, is_within_noise):
    analysis = analysed([*repeats(1, *one), *repeats(2, *two)])
    assert [figures.is_within_noise for figures in analysis.cells.values()] == [False, is_within_noise]
    assert row(analysis.cells[Cell(2, 64)])[3].startswith("~") == is_within_noise


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00025, "0.25 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (90.0, "1.5 min"),
        (5400.0, "1.5 h"),
    ],
)
def test_duration_has_a_unit_that_suits_it(value, text):
    assert duration(value).replace("\u00a0", " ") == text
