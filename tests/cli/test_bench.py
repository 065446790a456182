"""`python -m pyengine bench`, as a user runs it, and the scripts of benchmarks/, with small sizes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import pytest
import torch

from pyengine.cli.bench import report as bench_report
from pyengine.cli.bench import run as bench
from pyengine.cli.main import main
from pyengine.ops.plan import BucketPlan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEP = ("--model", "small0", "--variants", "floor,no_sync,engine", "--rounds", "3")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Measure on two workers; return the JSON lines."""
    out = tmp_path_factory.mktemp("bench") / "result.json"
    done = forked.python("-m", "pyengine", "bench", *STEP, "--json", "--out", str(out), cwd=out.parent)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(out.read_text())["cases"]) == ["small0:fp32"]
    return [json.loads(line) for line in done.stdout.splitlines()]


def events(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == name]


def times(*windows_s: float) -> list[dict[str, float]]:
    return [{"window": seconds} for seconds in windows_s]


@pytest.mark.slow
def test_json_has_variants_rounds_progress_and_a_conclusion(lines):
    variants = events(lines, "variant")
    assert [line["variant"] for line in variants] == ["floor", "no_sync", "engine"]
    assert all(line["window_min_ms"] == min(line["windows_ms"]) for line in variants)
    assert variants[0]["sync_p50_ms"] == 0
    assert {line["case"] for line in events(lines, "progress")} == {"windows, small0:fp32"}
    (conclusion,) = events(lines, "conclusion")
    assert any("GradSync" in sentence for sentence in conclusion["sentences"])


def run_script(name: str, *arguments: str) -> None:
    """Run a script of benchmarks/ in this process, as `python benchmarks/NAME` would."""
    path, threads = mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]), torch.get_num_threads()
    try:
        with path, mock.patch.object(sys, "argv", [name, *arguments]):
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


KERNELS = ("bench_kernels.py", "pack", "--seconds", "0.001", "--megabytes", "1")


def test_kernels_are_timed_beside_torch_and_the_memory(capsys):
    run_script(*KERNELS)
    header, *rows = capsys.readouterr().out.splitlines()[2:]
    assert header.endswith("x roof x torch")
    times = [list(map(float, row.split()[-6:])) for row in rows]
    assert len(times) == 11 and all(number > 0 for each in times for number in each[:3] + each[4:])


@pytest.mark.parametrize("arguments", [("pack", "--seconds", "inf"), ("sort",)])
def test_kernels_refuse_what_they_cannot_do(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script("bench_kernels.py", *arguments)
    assert stopped.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_several_models_come_into_one_report_and_one_file(tmp_path, capsys, monkeypatch):
    answers = [[bench.measure.Measurements({"engine": times(seconds)})] for seconds in (1.0, 2.0)]
    monkeypatch.setattr(bench, "launch", mock.Mock(side_effect=answers))
    out = tmp_path / "mine.json"
    assert main(["bench", "--model", "gpt,small0", "--variants", "engine", "--out", str(out)]) == 0
    saved = json.loads(out.read_text())
    names = ["gpt:fp32", "small0:fp32"]
    assert list(saved["cases"]) == names and len(saved["options"]["cases"]) == 2
    printed = capsys.readouterr().out
    assert all(f"windows, {name}" in printed for name in names)
    assert f"wrote {out}" in printed


def test_kernels_that_disagree_with_torch_stop_the_run(monkeypatch):
    right = BucketPlan.pack_

    def wrong(plan, flat, *arguments):
        right(plan, flat, *arguments)
        flat[-1] += 1

    monkeypatch.setattr(BucketPlan, "pack_", wrong)
    with pytest.raises(RuntimeError, match="pack fp32 -> fp32, 8 tensors: pyengine and torch compute diff"):
        run_script(*KERNELS)


def test_a_failing_worker_ends_the_run_and_what_was_measured_before_is_kept(tmp_path, capfd, monkeypatch):
    alone = bench.measure.Measurements({"engine": times(1.0, 1.0, 1.0)})
    answers = [[alone], RuntimeError("worker 1 of 2 failed")]
    monkeypatch.setattr(bench, "launch", mock.Mock(side_effect=answers))
    out = tmp_path / "mine.json"
    assert main(["bench", "--model", "gpt,small0", "--variants", "engine", "--out", str(out)]) == 1
    assert list(json.loads(out.read_text())["cases"]) == ["gpt:fp32"]
    printed = capfd.readouterr()
    assert "windows, gpt:fp32" in printed.out
    assert printed.err == "worker 1 of 2 failed\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "is_clear"),
    [
        ([1.0] * 5, [1.1, 1.2, 1.1, 1.3, 1.1], True),
        ([1.0] * 5, [1.1, 1.2, 0.9, 1.3, 1.1], False),
        ([1.0] * 4, [2.0] * 4, False),  # too few rounds
        ([1.0] * 10, [0.9] + [1.2] * 9, True),
    ],
)
def test_an_order_is_clear_only_when_nearly_all_rounds_agree(ours, theirs, is_clear):
    found = bench_report.ratio({"engine": times(*ours), "ddp": times(*theirs)}, "ddp", "engine")
    assert found.is_clear is is_clear
    assert ("within noise" in str(found)) is not is_clear


def test_the_floor_is_no_winner_and_noise_is_named():
    rounds = {"floor": [0.1] * 5, "ddp": [3.0] * 5, "engine": [2.0] * 5, "attach": [1.9, 2.1, 2.2, 2.1, 2.1]}
    measured = {name: times(*seconds) for name, seconds in rounds.items()}
    fastest, against = bench_report.on_windows(measured)
    assert fastest == (
        "GradSync had the shortest windows, with a median of 2000 ms; within noise of it: attach."
    )
    assert against == (
        "Compared with GradSync in the same rounds, a window took: DDP, sync every micro-batch 1.50 × as "
        "long (1.50 to 1.50)."
    )
    (noise,) = bench_report.on_windows({"ddp": times(1.0, 2.0, 2.0)})
    assert noise.startswith("Windows of one variant differ by 50% between rounds")


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("bench_*.py")))
def test_a_script_shows_its_arguments(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script(script, "--help")
    assert stopped.value.code == 0
    assert f"usage: {script}" in capsys.readouterr().out


def test_a_result_file_that_cannot_be_written_leaves_what_was_printed(monkeypatch, capsys, tmp_path):
    out = tmp_path / "results" / "result.json"
    out.parent.mkdir()

    def launch(*_: Any, **__: Any) -> list[bench.measure.Measurements]:
        out.parent.rmdir()  # during the measurement
        return [bench.measure.Measurements({"engine": times(1.0, 1.0, 1.0)})]

    monkeypatch.setattr(bench, "launch", launch)
    assert main(["bench", "--variants", "engine", "--json", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert '"variant": "engine"' in printed.out and '"out": null' in printed.out
    assert printed.err.startswith(f"cannot write {out} (No such file or directory)")
