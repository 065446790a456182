"""`python -m pyengine plan`: rows, remainders, learning rates, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyengine.cli.main import main

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return exit code and JSON lines."""
    code = main(["plan", "--json", *arguments])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_device_equals_two_four_and_eight(capsys):
    code, rows = plan(capsys)
    assert code == 0
    assert [(row["micro_batch"], row["workers"]) for row in rows] == [(256, 1), (128, 2), (64, 4), (32, 8)]
    assert all(row["accumulate"] == [1] * row["workers"] and row["lr_linear"] == 1 for row in rows)


def test_a_micro_batch_that_fits_is_accumulated(capsys):
    _, rows = plan(capsys, "--micro-batch", "8", "--dataset-size", "1000")
    assert [row["accumulate"] for row in rows] == [[32], [16] * 2, [8] * 4, [4] * 8]
    assert {row["steps_per_epoch"] for row in rows} == {4}


def test_learning_rates_grow_by_both_rules_and_steps_shrink(capsys):
    arguments = ("--global-batch", "64,256", "--workers", "1", "--lr", "0.5", "--dataset-size", "1024")
    _, rows = plan(capsys, *arguments)
    found = [(row["lr_linear"], row["lr_sqrt"], row["steps_per_epoch"]) for row in rows]
    assert found == [(0.5, 0.5, 16), (2.0, 1.0, 4)]
    _, rows = plan(capsys, *arguments, "--from-batch", "256")
    assert [(row["lr_linear"], row["lr_sqrt"]) for row in rows] == [(0.125, 0.25), (0.5, 0.5)]


def test_what_does_not_come_out_even_is_shared_and_its_waiting_named(capsys):
    code, (row,) = plan(capsys, "--global-batch", "40", "--micro-batch", "8", "--workers", "4")
    assert (code, row["accumulate"], row["idle"], row["problem"]) == (0, [1, 1, 1, 2], 3 / 8, "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--workers", "3"), "divided equally among 3 workers: use a batch of 255 or 258, or set --micro"),
        (("--workers", "300"), "divided equally among 300 workers: use a batch of 300, or set --micro"),
        (("--workers", "2", "--micro-batch", "24"), "global_batch=256 is not a multiple of micro_batch=24"),
        (("--workers", "64", "--micro-batch", "8"), "only 32 of the ranks would have a micro-batch"),
    ],
)
def test_a_row_that_cannot_be_run_names_the_reason_and_fails(capsys, arguments, problem):
    code, (row,) = plan(capsys, *arguments, "--dataset-size", "1000")
    assert code == 1
    assert problem in row["problem"]
    assert (row["accumulate"], row["steps_per_epoch"]) == ([], None)


def test_one_row_that_cannot_be_run_is_enough_to_fail_and_the_others_are_planned(capsys):
    code, rows = plan(capsys, "--workers", "3,4")
    assert (code, [bool(row["problem"]) for row in rows]) == (1, [True, False])


def test_a_very_large_batch_is_cautioned_against_once(capsys):
    _, (*rows, caution) = plan(capsys, "--global-batch", "256,16384")
    assert [row["event"] for row in rows] == ["plan"] * 8
    assert caution["event"] == "caution" and "16384 is 64 × from_batch=256" in caution["text"]


@pytest.mark.parametrize("dataset", [(), ("--dataset-size", "50000")])
def test_the_table_fits_a_narrow_terminal_and_names_what_is_equal(capsys, monkeypatch, dataset):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--workers", "1,2,3", "--global-batch", "256,1024", "--micro-batch", "64", "--lr", "3e-4")
    assert main(["plan", *arguments, *dataset]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert "256 × 1 = 128 × 2 (samples per rank × ranks): the same step." in text
    assert "256 on 3: uneven; 33 % of the time is spent waiting." in text
    assert ("steps" in text) == bool(dataset)


@pytest.mark.parametrize("columns", ["60", "40"])
def test_a_table_is_as_wide_as_its_numbers(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", "--lr", "3e-4"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [len(line) for line in table] == [60] * 4
    assert "…" not in "".join(table)


def _run(path: Path, **noise: object) -> str:
    """Write the steps of a run with a batch of 100 whose noise scale is 300; return the path."""
    known = {"noise": 1.0, "signal": 1.0, "scale": 300.0, "spread": 30.0, "windows": 40} | noise
    lines = [
        {"step": step, "count": count, "noise_scale": each}
        for step, (count, each) in enumerate([(100.0, known | {"scale": 1.0}), (90.0, None), (100.0, known)])
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "cou')
    return str(path)


def test_a_measured_noise_scale_gives_the_cost_of_other_batches(capsys, tmp_path):
    arguments = ("--from", _run(tmp_path / "steps.jsonl"), "--global-batch", "50,100,300", "--lr", "0.1")
    code, (noise, *rows) = plan(capsys, *arguments)
    assert [noise[name] for name in ("scale", "spread", "batch", "is_sure")] == [300, 30, 100, True]
    assert code == 0
    # Steps are 7, 4 and 2 times the minimum; samples are 7/6, 4/3 and 2 times the minimum.
    assert [row["steps"] for row in rows] == pytest.approx([7 / 4, 1, 1 / 2])
    assert [row["samples"] for row in rows] == pytest.approx([7 / 8, 1, 3 / 2])
    assert [row["lr_noise"] for row in rows] == pytest.approx([0.1 * 4 / 7, 0.1, 0.2])
    assert [row["lr_linear"] for row in rows] == pytest.approx([0.05, 0.1, 0.3])
    assert [row["lr_sqrt"] for row in rows] == pytest.approx([0.1 / 2**0.5, 0.1, 0.1 * 3**0.5])
    assert (rows[0]["steps_low"], rows[0]["steps_high"]) == pytest.approx((6.4 / 3.7, 7.6 / 4.3))
    _, (_, *rows) = plan(capsys, *arguments[:2])
    assert [row["global_batch"] for row in rows] == [12.5, 25, 50, 100, 200, 400, 800]


@pytest.mark.parametrize(
    ("noise", "text"),
    [
        ({}, "A larger batch pays off, up to about 300"),
        ({"scale": 40.0, "spread": 4.0}, "A smaller batch pays off, down to about 40"),
        ({"scale": 110.0, "spread": 20.0}, "The batch size is right, within the spread."),
        ({"spread": 200.0}, "This estimate is uncertain: its spread is unknown or more than a third"),
        ({"spread": None}, "This estimate is uncertain: its spread is unknown or more than a third"),
    ],
)
def test_what_a_noise_scale_suggests_is_printed_with_how_sure_it_is(capsys, tmp_path, noise, text):
    assert main(["plan", "--from", _run(tmp_path / "steps.jsonl", **noise)]) == 0
    assert text in " ".join(capsys.readouterr().out.split())


KNOWN = '{"count": 4.0, "noise_scale": {"scale": %s, "spread": null, "windows": 2}}'


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (None, "cannot be read ([Errno 2] No such file"),
        ('{"count": 4.0, "noise_scale": null}', "has a noise_scale: expected a file that pe.telemetry"),
        pytest.param("[" * 10**5, "no line of", id="nested"),
        (KNOWN % "null", "has no noise scale after 2 windows"),
        (KNOWN.replace("2}", r'"\u001b[2J"}') % "null", "has no noise scale after ?[2J windows"),
        (KNOWN % '"many"', "is damaged (ValueError("),
        ('{"count": 4.0, "noise_scale": {"value": 3}}', "is damaged (KeyError("),
        (KNOWN % "0", "noise scale of 0 at a batch size of 4; expected both to be finite and above 0"),
        (KNOWN % "Infinity", "has a noise scale of inf"),
        (KNOWN.replace("4.0", "0.0") % "9", "at a batch size of 0"),
        (KNOWN.replace("2}", "1e999}") % "9", "is damaged (OverflowError("),
        (KNOWN.replace("null", "-1") % "9", "a noise scale with a spread of -1"),
    ],
)
def test_a_run_without_a_noise_scale_is_refused(capsys, tmp_path, lines, text):
    path = tmp_path / "steps.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--from", str(path)])
    assert text in " ".join(capsys.readouterr().err.split())
