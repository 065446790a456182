"""`--wandb` and `--tensorboard` receive every step, the results and the plots."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from study_records import STEPS, analysed, made

from pyengine.cli.main import build_parser, main
from pyengine.cli.study.arguments import settings
from pyengine.cli.study.grid import WARM_UP_STEPS
from pyengine.cli.study.plots import Plot
from pyengine.cli.study.report import Content
from pyengine.cli.study.run import _is_tracked, track
from pyengine.cli.trackers import Trackers
from pyengine.step.step_record import StepRecord

RECORD = StepRecord(3, 2, 8.0, 1.5, 1.0, False, "", 64, 2, 0.5, 0.25, 1.0)
_STEPS = WARM_UP_STEPS + STEPS


@pytest.fixture
def wandb(monkeypatch):
    """Replace Weights & Biases with a mock, whose `runs` record their calls."""
    fake = mock.Mock(__spec__=ModuleSpec("wandb", None), Image=lambda path: path, runs=[])
    fake.init = lambda **about: fake.runs.append(mock.Mock(about=about)) or fake.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def rows(run: mock.Mock) -> list[dict[str, Any]]:
    return [call.args[0] for call in run.log.call_args_list]


def content(*arguments: str, plots: tuple[Plot, ...] = ()) -> Content:
    options = settings(build_parser().parse_args(["study", *arguments]))
    records = [made(1, 64), made(2, 64, step_s=0.125)]
    return Content(options, {"cpu": "some"}, records, {}, analysed(records), plots)


def test_a_study_has_a_run_of_each_cell_and_its_figures_in_weights_and_biases(wandb):
    plot = Plot("Speed-up", "", Path("speed_up.png"))
    found = content("--wandb", "mine", plots=(plot,))
    track(found)
    names = ["1-workers-batch-64-repeat-1", "2-workers-batch-64-repeat-1", "figures"]
    assert [run.about["name"] for run in wandb.runs] == names
    assert all(run.about["project"] == "mine" and run.finish.called for run in wandb.runs)
    one, _, figures = wandb.runs
    steps = [row for row in rows(one) if "pyengine/loss" in row]
    assert [row["pyengine/step"] for row in steps] == list(range(_STEPS))
    assert "pyengine/grad_norm" not in steps[0]  # runs.jsonl has no gradient norms
    assert rows(one)[-1] == {"pyengine/step": _STEPS, "study/accuracy": 0.75}
    assert one.about["config"].items() >= {"workers": 1, "status": "done", "cpu": "some"}.items()
    at_two = next(row for row in rows(figures) if row.get("workers") == 2)
    assert (at_two["speed_up/batch 64"], at_two["stalls/batch 64"]) == (2.0, 0)
    figures.define_metric.assert_any_call("speed_up/batch 64", step_metric="workers")
    assert rows(figures)[-1] == {"Speed-up": "speed_up.png"}


def test_a_study_is_in_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = content("--tensorboard", str(tmp_path))
    track(found)
    assert len(list(tmp_path.iterdir())) == 3
    speed_up = accumulator.EventAccumulator(str(tmp_path / "figures")).Reload().Scalars("speed_up/batch 64")
    assert [(each.step, each.value) for each in speed_up] == [(1, 1.0), (2, 2.0)]


def test_a_tracker_that_fails_leaves_the_report(wandb, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    assert not _is_tracked(content("--wandb", "mine"))
    err = capsys.readouterr().err
    assert "not everything was sent to the trackers: ZeroDivisionError" in err
    assert "the same command resumes" in err


def test_the_steps_of_train_go_to_each_tracker(wandb, tmp_path):
    pytest.importorskip("tensorboard")
    with Trackers("mine", tmp_path).run("gpt", group="engine", config={"workers": 2}) as run:
        run(RECORD)
        run.log({"accuracy": 0.5}, axis="pyengine/step", at=4)
    (found,) = wandb.runs
    assert [row["pyengine/step"] for row in rows(found)] == [3, 4]
    assert list((tmp_path / "gpt").glob("events.*")) != []


def test_without_a_tracker_nothing_is_written():
    with Trackers().run("gpt", group="", config={}) as run:
        run(RECORD)
        run.log({"accuracy": 0.5}, axis="pyengine/step", at=4)
        run.image("Speed-up", Path("nowhere.png"))


@pytest.mark.parametrize("command", ["train", "study"])
@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_package_that_is_missing_is_named_before_anything_starts(command, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:
        main([command, "--workers", "1", f"--{package}", "mine"])
    assert stop.value.code == 2
    message = f"argument --{package}: {package} is not installed: run pip install '.[telemetry]' in a clone"
    assert message in capsys.readouterr().err
