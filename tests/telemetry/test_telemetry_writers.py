"""One rank writes step records as JSON lines, to TensorBoard and to Weights & Biases; restarts continue."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import pyengine as pe
from pyengine.step.step_record import StepRecord
from pyengine.telemetry import JsonLines, Wandb, chrome_trace, numbers


def _record(step: int, **fields) -> StepRecord:
    values = {
        "micro_batches": 4, "count": 8.0, "loss": 0.5, "grad_norm": 1.25, "skipped": False, "reason": "",
        "bytes_on_wire": 64, "collectives": 2, "backward_s": 0.25, "exposed_sync_s": 0.125, "step_s": 0.5,
    }  # fmt: skip
    return StepRecord(step=step, **{**values, **fields})


SKIPPED = _record(1, loss=math.nan, grad_norm=math.inf, skipped=True, reason="inf on rank 1")


def _lines(path: Path) -> list[dict]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_holds_every_field_and_the_time_and_a_file_is_continued(tmp_path):
    with_norms = _record(2, grad_norms={"weight": 0.5, "bias": math.inf})
    for record in (_record(0), SKIPPED, with_norms):
        JsonLines(tmp_path / "steps.jsonl")(record)
    line, skipped, of_norms = _lines(tmp_path / "steps.jsonl")
    assert line.pop("time") > 1.7e9
    assert StepRecord(**line) == _record(0)
    # JSON has no nan and no inf.
    assert (skipped["loss"], skipped["grad_norm"], skipped["reason"]) == (None, None, "inf on rank 1")
    assert of_norms["grad_norms"] == {"weight": 0.5, "bias": None}


def test_numbers_are_those_of_the_record_that_are_there_without_the_step():
    found = numbers(_record(3, loss=None, grad_norms={"weight": 0.5, "bias": math.inf}))
    assert found.keys().isdisjoint({"loss", "reason", "step"})
    assert (found["skipped"], found["grad_norm"]) == (0.0, 1.25)
    assert (found["grad_norms/weight"], found["grad_norms/bias"]) == (0.5, math.inf)


def test_a_torn_line_spoils_no_other(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    JsonLines(path)(_record(1))
    assert path.read_text().splitlines()[1] == '{"step": 1, "lo'
    assert json.loads(path.read_text().splitlines()[2])["step"] == 1


@pytest.mark.parametrize("rank", ["0", -1, 1])
def test_a_writer_that_would_write_nothing_is_refused(tmp_path, rank):
    with pytest.raises(ValueError, match=f"^rank={rank!r}: expected the rank that writes, .* from 0 to 0"):
        JsonLines(tmp_path / "steps.jsonl", rank=rank)
    for write in (JsonLines, lambda path: chrome_trace(path).__enter__()):
        with pytest.raises(FileNotFoundError, match="there is no folder .*; create it first"):
            write(tmp_path / "missing" / "file.json")


def _train(folder: str) -> None:
    module = nn.Linear(2, 1)
    sync = pe.GradSync(module, accumulate=2)
    sync.on_step(JsonLines(f"{folder}/first.jsonl"))
    sync.on_step(JsonLines(f"{folder}/second.jsonl", rank=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for window in sync.windows([torch.ones(1, 2)] * 4):
        for x in window:
            sync.backward(module(x).mean())
        sync.step(optimizer)


def test_one_rank_writes(ranks, tmp_path):
    ranks(2).run(_train, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.jsonl", "second.jsonl"]
    for name in ("first.jsonl", "second.jsonl"):
        assert [line["micro_batches"] for line in _lines(tmp_path / name)] == [4, 4]


def test_tensorboard_holds_every_number_and_why_a_step_was_skipped(tmp_path):
    pytest.importorskip("tensorboard", reason="needs pyengine[telemetry]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pyengine.telemetry.tensorboard import TensorBoard

    board = TensorBoard(tmp_path)
    board(_record(0))
    board(SKIPPED)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {tag.removeprefix("pyengine/") for tag in events.Tags()["scalars"]} == set(numbers(_record(0)))
    assert [(e.step, e.value) for e in events.Scalars("pyengine/skipped")] == [(0, 0.0), (1, 1.0)]
    (text,) = events.Tensors("pyengine/reason/text_summary")
    assert text.tensor_proto.string_val == [b"inf on rank 1"]


class _Run:
    """Records the calls to a Weights & Biases run."""

    def __init__(self) -> None:
        self.metrics: list[tuple] = []
        self.logged: list[dict] = []
        self.summary: dict = {}

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)


def test_weights_and_biases_gets_an_axis_of_its_own_and_needs_a_run_on_the_rank_that_writes():
    run = _Run()
    listen = Wandb(run)
    listen(_record(7))
    listen(SKIPPED)
    assert ("pyengine/*", "pyengine/step") in run.metrics
    assert [values["pyengine/step"] for values in run.logged] == [7, 1]
    assert run.logged[0]["pyengine/loss"] == 0.5
    assert run.summary == {"pyengine/last_skip": "step 1: inf on rank 1"}
    with pytest.raises(ValueError, match=r"expected the run that wandb\.init returned"):
        Wandb(None)
    with mock.patch("pyengine.telemetry._is_own", return_value=False):
        Wandb(None)(_record(0))


@pytest.mark.slow
def test_weights_and_biases_works_offline_without_an_account(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs pyengine[telemetry]")
    for name, value in {"SILENT": "true", "CACHE_DIR": "cache", "CONFIG_DIR": "config"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value if name == "SILENT" else str(tmp_path / value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with wandb.init(project="test", mode="offline", dir=str(tmp_path)) as run:
        listen = Wandb(run)
        listen(_record(7))
        run.log({"mine": 1.0})
        listen(SKIPPED)
        summary = dict(run.summary)
    wandb.teardown()  # the process that writes the file may lag behind until it has ended
    assert (summary["pyengine/step"], summary["pyengine/skipped"], summary["mine"]) == (1, 1.0, 1.0)
    assert summary["pyengine/last_skip"] == "step 1: inf on rank 1"
    assert list(tmp_path.rglob("run-*.wandb"))
