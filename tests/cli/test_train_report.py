"""Step times in the report of `train`: a difference within the spread of the windows is called noise."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest

from pyengine.cli.noise import Range
from pyengine.cli.terminal import prepare_output
from pyengine.cli.train.compare import Row
from pyengine.cli.train.report import TrainReport
from pyengine.step.step_record import StepRecord

DDP = Row("ddp", "plain DDP", 1, 2, 2000, Range(0.5, 0.45, 0.55), 0.0, 0.5)
FASTER, NOISY = Range(0.25, 0.2, 0.3), Range(0.25, 0.2, 0.45)
RECORD = StepRecord(0, 2, 8.0, 1.5, 1.0, False, "", 64, 2, 0.5, 0.25, 1.0)


def compared(step_s: Range, *, as_json: bool = False) -> None:
    report = TrainReport(as_json=as_json)
    report.start("gpt", "tokens", done=0, steps=2, about={"workers": 2})
    report.compare(replace(DDP, mode="engine", label="pyengine", bytes_sent=1000, step_s=step_s), DDP)


@pytest.mark.parametrize(("step_s", "spread"), [(FASTER, "40%"), (NOISY, "100%")])
def test_a_difference_within_noise_has_a_caption(capsys, step_s, spread):
    compared(step_s)
    out = " ".join(capsys.readouterr().out.replace("\u00a0", " ").split())
    assert f"250 ms │ {spread}" in " ".join(out.split())
    assert ("median step: the difference is within noise" in out) == (step_s is NOISY)
    assert ("noise" in out) == (step_s is NOISY)


@pytest.mark.parametrize("columns", [40, 80])
def test_no_number_of_the_table_is_cut_off(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = replace(DDP, bytes_sent=343_712, step_s=Range(0.0318, 0.03, 0.04), full_window=1.4e-2)
    report = TrainReport()
    report.start("gpt", "tokens", done=0, steps=2, about={})
    report.compare(replace(wide, label="pyengine on DDP"), wide)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "343.7 kB" in out


@pytest.mark.parametrize("step_s", [FASTER, NOISY])
def test_json_has_the_range_and_whether_it_is_noise(capsys, step_s):
    compared(step_s, as_json=True)
    _, ours, ddp = map(json.loads, capsys.readouterr().out.splitlines())
    assert [ours[name] for name in ("step_s", "step_low_s", "step_high_s")] == [0.25, 0.2, step_s.high]
    assert ours["step_is_within_noise"] == ddp["step_is_within_noise"] == (step_s is NOISY)


def test_without_a_terminal_lines_have_the_time_left(capsys):
    report = TrainReport()
    report.start("gpt", "tokens", done=1, steps=3, about={})
    report.step(RECORD)
    report.step(RECORD)
    report.finish({"accuracy": 0.5})
    _, first, last, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2/3  loss 1.500")
    assert (first.endswith(" left"), last.endswith(" left")) == (True, False)


def test_a_run_that_was_complete_before_reports_its_quality(capsys):
    report = TrainReport(as_json=True)
    report.start("gpt", "tokens", done=3, steps=3, about={})
    report.finish({"accuracy": 0.5})
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["first_loss"] is None
    report = TrainReport()
    report.start("gpt", "tokens", done=3, steps=3, about={})
    report.finish({"accuracy": 0.5})
    assert "learnt: all steps done before this run, test accuracy 50.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_tables_have_no_signs_that_the_pipe_lacks(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    prepare_output()
    compared(NOISY)
    text = stream.buffer.getvalue().decode(encoding)
    assert "+---" in text
    assert "?" not in text
