"""`study.watch`: every step is timed, evaluations are not, and training ends by itself."""

from __future__ import annotations

import pytest
from ranks import RankError
from study_records import asked
from study_subjects import EVALUATION_TICKS

from pyengine.cli.study.arguments import EXAMPLES
from pyengine.cli.study.probe import work


@pytest.fixture
def measure(ranks, tmp_path):
    """Return a function: `measure("study_subjects:right", workers=2)` trains on the session's ranks."""

    def measure(target, *, workers=2, accumulate=2):
        run = asked(target, tmp_path / "beats", workers=workers, accumulate=accumulate)
        return ranks(workers).run(work, run)

    return measure


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_rank_times_every_step_and_rank_0_takes_the_accuracy(measure, workers):
    traces = measure("study_subjects:right", workers=workers)
    assert [len(trace.seconds) for trace in traces] == [12] * workers
    assert [len(trace.sync_s) for trace in traces] == [12] * workers
    assert all(seconds > 0 for trace in traces for seconds in trace.seconds)
    assert all(trace.peak_rss_bytes > 2**20 and trace.cpu_s > 0 for trace in traces)
    assert [step for step, _ in traces[0].accuracy] == [0, 4, 8, 12]
    assert [trace.accuracy for trace in traces[1:]] == [[]] * (workers - 1)
    assert traces[0].accuracy[-1][1] > traces[0].accuracy[0][1]


@pytest.mark.parametrize(("workers", "accumulate"), [(2, 1), (3, 2)])
def test_noise_scale_is_measured_on_every_rank(measure, workers, accumulate):
    traces = measure("study_subjects:right", workers=workers, accumulate=accumulate)
    ((scale, spread),) = {(trace.noise_scale, trace.noise_spread) for trace in traces}
    # The samples of a batch are independent, and their gradients differ.
    assert 0 < scale < 1000 and spread > 0


def test_noise_scale_is_in_samples_and_the_last_one(measure):
    (trace,) = measure("study_subjects:noisy", workers=1)
    assert (trace.noise_scale, trace.noise_spread) == (10.0, 0.5)  # the estimate of step 10


@pytest.mark.parametrize(("function", "workers"), [("exact", 2), ("right", 1), ("without_accuracy", 1)])
def test_one_worker_and_engines_that_refuse_have_no_noise_scale(measure, function, workers):
    for trace in measure(f"study_subjects:{function}", workers=workers, accumulate=2):
        assert (trace.noise_scale, trace.noise_spread) == (None, None)


def test_evaluations_are_no_part_of_any_step_on_any_rank(measure):
    traces = measure("study_subjects:slow_evaluation")
    assert all(ticks < EVALUATION_TICKS for trace in traces for ticks in trace.seconds)
    assert traces[0].sync_s == [0.25] * 12


def test_accuracy_may_be_left_out(measure):
    assert measure("study_subjects:without_accuracy")[0].accuracy == []


def test_example_of_the_help_runs(measure, tmp_path, monkeypatch):
    example = [line[2:] for line in EXAMPLES.splitlines() if line.startswith(("  import", "  def", "      "))]
    assert len(example) <= 25
    (tmp_path / "mine_study.py").write_text("\n".join(example))
    monkeypatch.syspath_prepend(tmp_path)
    traces = measure("mine_study:train")
    assert len(traces[0].seconds) == 12
    assert traces[0].accuracy[-1][1] > 0.6


WRONG = [
    ("watches_nothing", "returned after 0 of 12 steps: call study.watch"),
    ("ends_early", "returned after 1 of 12 steps"),
    ("watches_twice", "study.watch was called twice"),
    ("never_starts_the_clock", "study.on_step was called before study.watch"),
    ("without_noise_scale", "measured by itself"),
    ("says_nothing_on_rank_0", "quality returned None on rank 0"),
]


@pytest.mark.parametrize(("function", "message"), WRONG)
def test_wrong_use_says_what_is_needed(measure, function, message):
    with pytest.raises(RankError, match=message):
        measure(f"study_subjects:{function}", workers=1)
