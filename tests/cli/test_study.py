"""`study`: the whole grid, resumed and reported; once with real workers, some of which fail or hang."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import forked
import pytest
from study_records import STEPS, analysed, asked, made
from study_subjects import goes

from pyengine.cli.main import build_parser, main
from pyengine.cli.study import plots as study_plots
from pyengine.cli.study.arguments import BUILT_IN, settings
from pyengine.cli.study.grid import WARM_UP_STEPS
from pyengine.cli.study.probe import Run, Trace, work
from pyengine.cli.study.report import StudyReport
from pyengine.cli.study.run import study
from pyengine.cli.study.supervise import RunOutcome, Watch

PICTURES = {"speed_up", "throughput", "accuracy_over_time", "accuracy_over_steps"}
PICTURES |= {"heat_map", "noise_scale", "resources"}
_STEPS = WARM_UP_STEPS + STEPS


class Runner:
    """Simulates runs, whose steps take `0.5 / workers + 0.25` seconds; trial runs are listed in `trials`.

    `bad` has the statuses of runs that do not succeed, by run.
    """

    def __init__(self, reason: str = "boom", **bad: str) -> None:
        self.runs: list[tuple[int, int, int]] = []
        self.reason, self.bad, self.busy = reason, bad, 0.0
        self.trials: list[Run] = []

    def __call__(self, run: Run, log: Path, watch: Watch) -> RunOutcome:
        if log.stem == "trial":
            self.trials.append(run)
            status = self.bad.get("trial", "done")
            return RunOutcome(
                status, "", run.steps, [_trace(run)] if status == "done" else [], 20.0, self.busy
            )
        self.runs.append((run.workers, run.global_batch, run.seed))
        watch(1, None)
        watch(_STEPS, 0.5)
        status = self.bad.get(f"w{run.workers}_b{run.global_batch}_r{run.seed}", "done")
        if status == "interrupted":
            raise KeyboardInterrupt
        traces = [_trace(run) for _ in range(run.workers)] if status == "done" else []
        return RunOutcome(status, "" if traces else self.reason, _STEPS, traces, wall_s=2.0, busy=self.busy)


def _trace(run: Run) -> Trace:
    step_s = 0.5 / run.workers + 0.25
    return Trace(
        seconds=[step_s] * _STEPS,
        sync_s=[step_s / 4] * _STEPS,
        losses=[float("nan")] * _STEPS,
        accuracy=[(0, 0.1), (_STEPS, 0.5)],
        bytes_on_wire=64,
        cpu_s=step_s * _STEPS,
        peak_rss_bytes=2**28,
        noise_scale=24.0 if run.workers > 1 else None,
        noise_spread=4.0 if run.workers > 1 else None,
    )


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function: `make(runner, "--repeats", "2")` studies 1 and 2 workers with batches of 8 and 16.

    Runs are simulated, on two cores. Plots take a second or more, so they are small, and drawn only with
    `pictures=True`.
    """
    monkeypatch.setattr(study_plots, "_DPI", 30)
    monkeypatch.setattr("pyengine.cli.study.run.num_cores", lambda: 2)
    draw = study_plots.draw

    def run(runner, *arguments, report=None, pictures=False):
        monkeypatch.setattr(study_plots, "draw", draw if pictures else lambda *_: [])
        grid = ("--workers", "2,1", "--batch", "16,8", "--repeats", "2", "--out", str(tmp_path / "out"))
        options = build_parser().parse_args(["study", *grid, *arguments])
        return study(settings(options), runner, report or StudyReport(as_json=True))

    return run


def lines(capsys: pytest.CaptureFixture[str], event: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line for line in found if event in ("", line["event"])]


GRID = [(1, 8), (1, 16), (2, 8), (2, 16)]
ONCE = [(workers, batch, seed) for seed in (0, 1) for workers, batch in GRID]


def test_whole_grid_is_run_once_and_then_again_with_another_seed(make, tmp_path):
    runner = Runner()
    assert make(runner) == 0
    assert runner.runs == ONCE
    assert "NaN" not in (tmp_path / "out" / "runs.jsonl").read_text()


def test_a_trial_run_forecasts_the_study_and_every_run_the_rest(make, capsys):
    runner = Runner()
    make(runner, "--dataset-size", "768", "--epochs", "1", "--repeats", "1")
    found = lines(capsys)
    # The trial's steps of 0.75 s begin 5.75 s after the start. Two workers are expected to halve them.
    forecast = 4 * 5.75 + 96 * (0.75 + 0.75 + 0.375 + 0.375)
    assert [line["seconds"] for line in found if line["event"] == "forecast"] == [forecast]
    left = [line["left_s"] for line in found if line["event"] == "run"]
    assert left == sorted(left, reverse=True) and left[-1] == 0
    assert [(run.workers, run.global_batch, run.steps) for run in runner.trials] == [(1, 8, 12)]
    assert len(runner.runs) == len(left)


def test_runs_that_are_there_take_the_place_of_the_trial(make, capsys):
    short = ("--batch", "8", "--dataset-size", str(8 * _STEPS), "--epochs", "1")
    make(Runner(), *short, "--repeats", "1")
    capsys.readouterr()
    runner = Runner()
    make(runner, *short)
    assert runner.trials == []
    (forecast,) = lines(capsys, "forecast")
    assert forecast["seconds"] == 2 * 2.0


def test_a_trial_that_fails_is_named_and_the_study_goes_on(make, capsys):
    assert make(Runner(trial="failed"), report=StudyReport()) == 0
    out = capsys.readouterr().out.replace("\u00a0", " ")
    assert "duration unknown: the trial run did not succeed (see logs/trial.txt)" in out
    assert "repeat 1: done in 2.00 s; about" in out


def test_second_command_measures_nothing_and_reports_the_same(make, capsys):
    make(Runner())
    before = lines(capsys, "cell")
    runner = Runner()
    assert make(runner) == 0
    assert runner.runs == []
    assert lines(capsys, "cell") == before != []


def test_interrupted_study_goes_on_where_it_stopped(make):
    with pytest.raises(KeyboardInterrupt):
        make(Runner(w2_b8_r0="interrupted"))
    runner = Runner()
    assert make(runner) == 0
    assert runner.runs == ONCE[2:]


def test_smaller_grid_reports_only_what_was_asked_for(make, capsys):
    make(Runner())
    capsys.readouterr()
    make(Runner(), "--batch", "8", "--repeats", "1")
    cells = lines(capsys, "cell")
    assert [(cell["workers"], cell["batch"], cell["runs"]) for cell in cells] == [(1, 8, 1), (2, 8, 1)]


def test_failed_run_does_not_end_the_study_and_is_tried_again_when_asked(make):
    assert make(Runner(w1_b8_r0="failed")) == 1
    again, retried = Runner(), Runner()
    assert make(again) == 1
    assert again.runs == []
    assert make(retried, "--retry") == 0
    assert retried.runs == [(1, 8, 0)]


def test_study_of_which_nothing_was_measured_has_an_exit_code_of_its_own(make, tmp_path):
    bad = {f"w{workers}_b{batch}_r{seed}": "failed" for workers, batch, seed in ONCE}
    assert make(Runner(**bad)) == 2
    assert "Nothing was measured" in (tmp_path / "out" / "report.html").read_text()


def test_study_whose_tracker_fails_has_its_report(make, tmp_path, monkeypatch):
    monkeypatch.setattr("pyengine.cli.study.run.track", lambda content: 1 / 0)
    assert make(Runner()) == 3
    assert (tmp_path / "out" / "report.html").exists()


def test_cell_that_cannot_be_run_is_named_and_left_out(make, capsys):
    runner = Runner()
    assert make(runner, "--workers", "1,3", "--batch", "9,16") == 0
    assert (3, 16, 0) not in runner.runs
    (found,) = lines(capsys, "impossible")
    assert (found["workers"], found["batch"]) == (3, 16)
    assert "nearest: 15 and 18" in found["reason"]


def test_figures_are_printed_with_the_recommendation(make, capsys):
    make(Runner(), "--batch", "16")
    found = lines(capsys)
    cell = next(line for line in found if line["event"] == "cell" and line["workers"] == 2)
    assert cell["samples_s"] == {"mid": 32.0, "low": 32.0, "high": 32.0}
    assert (cell["speed_up"]["mid"], cell["sync_share"]["mid"]) == (1.5, 0.25)
    best = [line["best"] for line in found if line["event"] == "recommendation"]
    assert best == [{"workers": 2, "batch": 16}]


def test_tables_name_runs_and_report(make, capsys, tmp_path):
    make(Runner(w2_b8_r0="stalled"), report=StudyReport())
    out = capsys.readouterr().out
    assert "2 workers × batch 8, repeat 1: stalled: boom" in out
    assert "has the best time to" in out
    assert "runs that did not succeed: 1" in out
    assert f"report: {tmp_path / 'out' / 'report.html'}" in out
    (headings,) = [line for line in out.splitlines() if "speed-up" in line]
    assert len(headings) <= 80
    assert " ".join(headings.split()) == "workers batch samples/s speed-up waits to goal best noise scale"
    assert [line.split()[-3:] for line in out.splitlines() if "±" in line] == [["24", "±", "4"]] * 2


def test_report_shows_text_as_it_is_and_runs_none_of_it(make, tmp_path):
    hostile = """<script>alert(1)</script>"' onload='x' {{ 7 * 7 }}"""
    make(Runner(hostile, w2_b8_r1="failed"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39; onload=&#39;x&#39; {{ 7 * 7 }}" in page
    assert "<script" not in page


def test_report_takes_the_place_of_a_link_and_follows_none(make, tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("precious")
    for name in ("report.html", "report.part"):
        (out / name).symlink_to(victim)
    make(Runner())
    assert victim.read_text() == "precious"
    assert not (out / "report.html").is_symlink() and "<html" in (out / "report.html").read_text()


def test_report_names_what_is_not_in_the_figures(make, tmp_path):
    make(Runner(w2_b8_r1="stalled"), "--batch", "8,9")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 workers × batch 8, repeat 2" in page
    assert "logs/2-workers-batch-8-repeat-2.txt" in page
    assert "a global batch of 9 is not a multiple of 2 workers; nearest: 8 and 10" in page
    assert "<td>24 ± 4</td>" in page


def test_report_counts_runs_of_a_busy_machine(make, tmp_path):
    make(Runner(), "--repeats", "1")
    runner = Runner()
    runner.busy = 0.5
    make(runner)
    page = " ".join((tmp_path / "out" / "report.html").read_text().split())
    assert "8 runs, 16.00 s in all; 4 of them began while other programs used more than 10.0 %" in page


def test_the_page_has_every_picture_and_needs_no_other_file(make, tmp_path):
    make(Runner(), pictures=True)
    plots = tmp_path / "out" / "plots"
    assert {path.stem for path in plots.glob("*.png")} == PICTURES
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.findall(r"https?:|file:|<link|<script|@import|url\(", page) == []
    assert re.findall(r'src="(?!data:image/png;base64,)', page) == []
    assert page.count('src="data:image/png;base64,') == len(PICTURES)
    assert "Nothing was measured" not in page
    # This study has no run of one worker and no noise scale, so these two old plots are deleted.
    study_plots.draw(analysed([made(2, 64)]), plots)
    assert {path.stem for path in plots.glob("*.png")} == PICTURES - {"speed_up", "noise_scale"}


def test_times_in_the_heat_map_have_a_unit():
    figure = study_plots._heat_map(analysed([made(1, 64, step_s=128.0)]))
    (text,) = figure.axes[1].texts
    assert text.get_text() == "34.2\u00a0min"


def test_the_noise_scale_has_a_line_for_each_number_of_workers_that_has_one():
    figure = study_plots._noise_scale(
        analysed([made(1, 64), made(2, 64, noise_scale=30.0, noise_spread=4.0)])
    )
    assert figure is not None
    assert figure.axes[0].get_legend_handles_labels()[1] == ["the batch", "2"]


@pytest.mark.parametrize(
    "arguments",
    [("--fixed", "per-worker", "--target", "0.9"), ("--workers", "1", "--threads", "2")],
    ids=lambda arguments: arguments[0],
)
def test_every_kind_of_study_has_a_report(make, tmp_path, arguments):
    assert make(Runner(), *arguments, pictures=True) == 0
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("arguments", [("--seed", "1"), ("--micro-batch", "4"), ("--epochs", "2")])
def test_folder_of_another_study_is_refused(make, tmp_path, capsys, arguments):
    make(Runner())
    with pytest.raises(SystemExit) as stop:
        main(["study", "--workers", "1", "--batch", "8", "--out", str(tmp_path / "out"), *arguments])
    assert stop.value.code == 2
    assert "use another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_real_study_goes_on_over_runs_that_fail_and_hang(tmp_path, capsys, monkeypatch):
    forked.fork_runs(monkeypatch.setattr)
    own = ["--train", "study_subjects:sometimes", "--dataset-size", "64"]
    arguments = ["study", *own, "--out", str(tmp_path / "out"), "--json"]
    grid = ["--workers", "1,2", "--batch", "8,16", "--repeats", "1", "--stall-timeout", "8"]
    assert main([*arguments, *grid]) == 1
    found = lines(capsys)
    runs = {(line["workers"], line["batch"]): line for line in found if line["event"] == "run"}
    statuses = dict(zip(GRID, ["done", "failed", "done", "stalled"], strict=True))
    assert {cell: line["status"] for cell, line in runs.items()} == statuses
    assert runs[1, 16]["reason"] == "worker 0 of 1 failed (exit code 1): ValueError: boom"
    assert runs[2, 16]["reason"] == "no progress for 8 s after step 0 (--stall-timeout)"
    cells = {(line["workers"], line["batch"]): line for line in found if line["event"] == "cell"}
    assert list(cells) == [(1, 8), (2, 8)]
    assert cells[2, 8]["speed_up"]["mid"] > 0 and cells[2, 8]["accuracy"]["mid"] > 0.8
    failed, stalled = (
        (tmp_path / "out" / "logs" / f"{workers}-workers-batch-16-repeat-1.txt").read_text()
        for workers in (1, 2)
    )
    assert "ValueError: boom" in failed
    pids = re.findall(r"pid (\d+)", stalled)
    assert len(pids) == 2 and all(goes(int(pid)) for pid in pids)
    assert main([*arguments, *grid]) == 1  # nothing is run again
    plan = lines(capsys)[0]
    assert (plan["runs"], plan["kept"]) == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_built_in_models_learn(model, ranks, tmp_path):
    run = asked(BUILT_IN.format(model), tmp_path / "beats", micro_batch=4, evaluate_every=12)
    first, last = ranks(2).run(work, run)[0].accuracy
    assert (first[0], last[0]) == (0, 12)
    assert last[1] > first[1]
