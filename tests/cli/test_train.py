"""`python -m pyengine train`, as a user runs it: two real workers, tiny settings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pyengine.cli.arguments import Conflict
from pyengine.cli.main import build_parser
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.train import run as train_run
from pyengine.cli.train.arguments import check_resumed, settings
from pyengine.cli.train.compare import Row, compare
from pyengine.cli.train.report import TrainReport
from pyengine.cli.train.run import TRACED_WINDOWS
from pyengine.step.step_record import StepRecord

ACCUMULATE = 3
STEPS = 3
RUNS = [
    ("--model", "cnn", "--trace", "cnn.json"),
    ("--mode", "ddp-hook", "--trace", "hook.json"),
    ("--mode", "ddp", "--model", "cnn"),
]

# fp32 sums of 6 micro-batches differ from the float64 backward by a few times 2^-24. 1e-5 is far above that
# and far below the error of a wrong divisor, which is at least 10 %.
ROUNDING = 1e-5


def events(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == name]


@pytest.fixture(
    params=[RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in RUNS[1:])], ids=" ".join
)
def lines(request, train):
    return train(*request.param)


def test_every_step_is_reported_with_a_finite_loss(lines):
    steps = events(lines, "step")
    assert [line["step"] for line in steps] == list(range(STEPS)) * len(events(lines, "start"))
    assert all(math.isfinite(line["loss"]) and not line["skipped"] for line in steps)
    assert all(line["micro_batches"] == 2 * ACCUMULATE for line in steps)


def test_training_sends_what_the_comparison_counts(lines):
    mode = events(lines, "start")[0]["mode"]
    for row in events(lines, "comparison"):
        if row["mode"] == mode:
            last = [line for line in events(lines, "step") if line["model"] == row["model"]][-1]
            # A run with --trace also measures the noise scale, with one more all-reduce of 16 bytes.
            more = last["noise_scale"] is not None
            assert last["collectives"] == row["collectives"] + more
            assert last["bytes_on_wire"] == row["bytes_sent"] + 16 * more


def test_ddp_sends_each_bucket_a_backward_and_pyengine_each_and_a_header_a_window(lines):
    for row in events(lines, "comparison"):
        expected = ACCUMULATE * row["buckets"] if row["mode"] == "ddp" else row["buckets"] + 1
        if (row["model"], row["mode"]) == ("cnn", "ddp-hook"):
            expected += 2  # BatchNorm's buffers (floats and counts), not counted for plain DDP
        assert row["collectives"] == expected
    assert {row["mode"] for row in events(lines, "comparison")} >= {"ddp"}


def test_gradients_equal_the_big_batch_but_those_of_ddp_in_a_short_window(lines):
    for row in events(lines, "comparison"):
        assert row["full_window"] < ROUNDING
        assert row["short_window"] > 0.1 if row["mode"] == "ddp" else row["short_window"] < ROUNDING


@pytest.mark.slow
def test_both_models_run_in_order_by_default_and_report_quality_on_unseen_data(train):
    gpt, cnn = events(train(*RUNS[1]), "trained")
    assert (gpt["model"], cnn["model"]) == ("gpt", "cnn")
    assert math.isfinite(gpt["held_out_loss"])
    assert 0 <= cnn["accuracy"] <= 1


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (RUNS[0], ["cnn.json"]),
        pytest.param(RUNS[1], ["hook-gpt.json", "hook-cnn.json"], marks=pytest.mark.slow),
    ],
)
def test_a_trace_shows_backward_buckets_and_what_is_exposed(train, run, names):
    lines = train(*run)
    traces = events(lines, "trace")
    assert [Path(line["path"]).name for line in traces] == names
    for line in traces:
        assert line["windows"] == TRACED_WINDOWS
        profile = json.loads(Path(line["path"]).read_text())
        assert profile["distributedInfo"]["rank"] == 0
        ranges = Counter(
            event["name"]
            for event in profile["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith("pyengine: ")
        )
        assert ranges["pyengine: backward"] == TRACED_WINDOWS * ACCUMULATE
        assert ranges["pyengine: exposed_sync"] >= TRACED_WINDOWS
        assert ranges["pyengine: optimizer"] == TRACED_WINDOWS
        buckets = [row["buckets"] for row in events(lines, "comparison") if row["model"] == line["model"]]
        found = [ranges[f"pyengine: launch bucket {n}"] for n in range(buckets[0] + 1)]
        assert found == [TRACED_WINDOWS] * buckets[0] + [0]


@pytest.mark.parametrize(
    "run", [RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in RUNS[1:])], ids=" ".join
)
def test_only_a_run_that_traces_measures_and_draws_gradient_norms_and_noise_scale(train, run):
    lines = train(*run)
    assert all(bool(step["grad_norms"]) == ("--trace" in run) for step in events(lines, "step"))
    for line, trace in zip(events(lines, "norms"), events(lines, "trace"), strict=True):
        last = [step for step in events(lines, "step") if step["model"] == line["model"]][-1]["noise_scale"]
        assert (line["noise_scale"], line["spread"]) == (last["scale"], last["spread"])
        if find_spec("matplotlib") is not None:
            assert line["plot"] == trace["path"].replace(".json", "-norms.png")
            assert Path(line["plot"]).read_bytes().startswith(b"\x89PNG")


class Steps(TrainReport):
    def __init__(self) -> None:
        super().__init__(is_silent=True)
        self.steps: list[int] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)


def trained(folder: str, *steps: str) -> list[list[int]]:
    reports = []
    for number in steps:
        chosen = ["train", "--model", "cnn", "--accumulate", "1", "--steps", number, "--checkpoints", folder]
        reports.append(Steps())
        train_run.train(DigitsTask(), settings(build_parser().parse_args(chosen)), reports[-1])
    return [report.steps for report in reports]


def test_a_training_that_is_complete_runs_no_further_step(ranks, tmp_path):
    assert ranks(2).run(trained, str(tmp_path), "2", "2") == [[[0, 1], []]] * 2


def test_a_training_resumes_with_its_own_settings_only(tmp_path):
    def chosen(*more):
        made = settings(build_parser().parse_args(["train", "--checkpoints", str(tmp_path), *more]))
        for model, folder in made.checkpoints.items():
            check_resumed(made, model, folder)

    chosen("--lr", "0.1")  # nothing was saved with these settings
    chosen("--model", "cnn")
    (tmp_path / "cnn" / "step-2.rank-0-of-2.pt").touch()
    chosen("--model", "cnn", "--json")
    chosen("--model", "gpt", "--micro-batch", "2")
    for option, given, before in (
        ("--lr", "0.1", "0.01"),
        ("--steps", "90", "40"),
        ("--workers", "1", "2"),
        ("--wire", "bf16", "fp32"),
    ):
        folder = f"the checkpoints in {tmp_path}/cnn were saved by a run with {option} {before}:"
        with pytest.raises(Conflict, match=re.escape(f"argument {option}: got {given}, but {folder}")):
            chosen(option, given)


@pytest.mark.parametrize("damaged", ["", "[1]", None], ids=["empty", "no settings", "a folder"])
def test_settings_of_a_training_that_cannot_be_read_are_refused(tmp_path, damaged):
    (tmp_path / "cnn").mkdir()
    (tmp_path / "cnn" / "step-2.rank-0-of-2.pt").touch()
    file = tmp_path / "cnn" / "settings.json"
    file.mkdir() if damaged is None else file.write_text(damaged)
    made = settings(build_parser().parse_args(["train", "--model", "cnn", "--checkpoints", str(tmp_path)]))
    with pytest.raises(Conflict, match=r"settings\.json has no settings of a training run .*: delete it"):
        check_resumed(made, "cnn", made.checkpoints["cnn"])


def test_two_trainings_do_not_write_to_one_folder(tmp_path):
    with (
        train_run.locked(tmp_path),
        pytest.raises(Conflict, match="another training run is writing to"),
        train_run.locked(tmp_path),
    ):
        pass
    with train_run.locked(tmp_path):
        pass


def encoded() -> list[Row]:
    chosen = ["train", "--model", "cnn", "--accumulate", "3", "--wire", "int8-ef"]
    return compare(DigitsTask(), settings(build_parser().parse_args(chosen)))


def test_a_wire_of_bytes_sends_a_quarter_and_is_near_in_the_short_window_too(ranks):
    ours, ddp = ranks(2).run(encoded)[0]
    assert ours.bytes_sent == pytest.approx(ddp.bytes_sent / 3 / 4, rel=0.05)  # plus scales; the header
    # Two roundings of at most 1/127 of a block's largest value, on average much less.
    assert ROUNDING < max(ours.full_window, ours.short_window) < 0.05 < ddp.short_window


def narrow_and_wide() -> list[list[Row]]:
    wide = settings(build_parser().parse_args(["train", "--model", "cnn", "--accumulate", "3"]))
    narrow = replace(wide, dtype="bf16", wire="bf16", accumulator="native")
    return [compare(DigitsTask(), each) for each in (narrow, wide)]


def test_bf16_parameters_and_wire_halve_the_bytes(ranks):
    narrow, wide = ranks(2).run(narrow_and_wide)[0]
    for half, whole in zip(narrow, wide, strict=True):
        assert 2 * half.bytes_sent == pytest.approx(whole.bytes_sent, rel=0.01)  # the header stays float64
    # Weights, activations, gradients of each micro-batch and sums are rounded to 8 bits. A wrong divisor
    # causes a larger error.
    assert max(narrow[0].full_window, narrow[0].short_window) < 0.05 < narrow[1].short_window
