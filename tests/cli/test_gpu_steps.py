"""`make gpu` (benchmarks/gpu.py) and its scripts, as far as they run without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pyengine.cli.bench import measure as windows
from pyengine.cli.bench import models

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/ is not here")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Scripts import each other, and dataclasses resolve annotations through sys.modules.
    path = mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    with path, mock.patch.dict(sys.modules, {name: module}):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu():
    return load("gpu")


@pytest.fixture
def run(gpu, tmp_path, monkeypatch):
    for name in ("LOGS", "RESULTS"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(gpu, name, tmp_path / name)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "LOGS" / "started").touch()
    yield gpu.Run(is_dry=False, out=tmp_path / "OUT")


def shell(gpu: Any, text: str) -> Any:
    return gpu.Task("task", ["sh", "-c", text], [], 60)


def commands(gpu: Any) -> list[list[str]]:
    tasks = [task for step in gpu.steps().values() for task in step]
    return [list(command) for task in tasks for command in (task.command, task.dry)]


def test_every_file_that_a_command_names_is_there(gpu):
    named = {part for command in commands(gpu) for part in command if re.match(r"(tests|benchmarks)/", part)}
    assert {"tests/ops", "tests/distributed/test_on_cuda.py", "tests/unit/test_rng.py"} <= named
    assert all((ROOT / part).exists() for part in named)


def test_every_window_that_is_asked_for_is_an_argument_of_its_script(gpu, monkeypatch):
    script = load("bench_windows")
    found = [command[2:] for command in commands(gpu) if "benchmarks/bench_windows.py" in command]
    assert len(found) == 2 * len(gpu.CASES)
    for arguments in found:
        monkeypatch.setattr(sys, "argv", ["bench_windows.py", *arguments])
        model, dtype, micro_batches = script._options().cases[0].split(":")
        assert model in models.MODELS and dtype in windows.DTYPES and int(micro_batches)


def test_test_files_are_found_by_their_mark(gpu):
    files = gpu.engine_files()
    assert files[0].startswith("tests/distributed/")
    assert not any(path.startswith("tests/ops/") for path in files)


# ---- results of tasks ----


@pytest.mark.parametrize(
    ("command", "seconds_left", "ends"),
    [
        (["sh", "-c", "exit 3"], 60, ["failed", "passed"]),
        (["no-such-tool"], 60, ["missing", "passed"]),
        (["touch", "begun"], 1, ["no", "no"]),  # the line says "no time"
    ],
)
def test_a_task_that_fails_or_cannot_begin_is_told(run, gpu, command, seconds_left, ends):
    run.step("step", [gpu.Task("task", command, [], 60), shell(gpu, "echo fine")], seconds_left)
    assert [line.split()[1] for line in run.lines] == ends and run.has_failed
    assert not (gpu.ROOT / "begun").exists()


def test_a_task_that_takes_too_long_is_ended_with_all_it_has_started(run, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST_S", 0)
    run.step("step", [shell(gpu, "sleep 60 & echo $!; wait")], 0.5)
    *_, timed, out, _, _, child = run.lines[0].split()
    assert (timed, out) == ("timed", "out")
    stat, until = Path(f"/proc/{child}/stat"), time.monotonic() + 10
    while time.monotonic() < until and stat.exists() and ") Z" not in stat.read_text():
        time.sleep(0.01)
    assert time.monotonic() < until


def test_new_result_files_come_out_behind_every_task(run, gpu):
    old = gpu.RESULTS / "old.json"
    old.write_text("{}")
    then = time.time() - 100
    os.utime(old, (then, then))
    run.step("step", [shell(gpu, "echo '{}' > RESULTS/new.json; exit 1")], 60)
    with tarfile.open(run.out / "results.tar") as archive:
        assert archive.getnames() == ["RESULTS/new.json"]
    assert sorted(path.name for path in run.out.iterdir()) == ["gpu.log", "results.tar", "summary.txt"]


# ---- summaries of logs ----


@pytest.mark.parametrize(
    ("log", "told", "is_well"),
    [
        (
            "a.py::b PASSED [ 50%]\na.py::c FAILED [100%]\n== 1 failed, 1 passed ==",
            "1 passed, 1 failed",
            True,
        ),
        ("a.py::b SKIPPED (no device) [100%]\n== 1 skipped ==", "1 skipped", False),
        ("[gw0] [ 10%] PASSED a.py::b\n[gw1] [ 20%] PASSED a.py::c\n", "2 passed", True),  # cut off
        ("ImportError: no such module", "", False),
    ],
)
def test_tests_are_counted_and_none_is_a_failure(gpu, log, told, is_well):
    assert gpu._tests_told(log) == (told, is_well)


def test_targets_are_counted(gpu):
    log = "met  90 % of the copy rate: 95.0%\nMISS 90 % of the copy rate: 80.0%\nMISS 10 us above"
    assert gpu._targets_told(log) == ("1 targets met, 2 missed", True)


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","pack_kernel","(8192, 1, 1)","Command line profiler metrics","gpu__time_duration.sum","ns","1,250"
"0","7","pack_kernel","(8192, 1, 1)","Command line profiler metrics","lts__throughput","%","81.5"
"1","7","unpack_kernel","(8192, 1, 1)","Command line profiler metrics","gpu__time_duration.sum","ns","1,300"
"""


def test_counters_are_saved_by_case(gpu, run):
    (gpu.LOGS / "ncu.csv").write_text(NCU)
    (gpu.LOGS / "cases.json").write_text(json.dumps({"machine": {"gpu": "H"}, "cases": ["pack", "unpack"]}))
    gpu.save_counters()
    (path,) = gpu.RESULTS.glob("*-counters-cuda.json")
    found = json.loads(path.read_text())
    assert found["machine"] == {"gpu": "H"}
    pack = {"case": "pack", "kernel": "pack_kernel", "grid": "(8192, 1, 1)"}
    unpack = pack | {"case": "unpack", "kernel": "unpack_kernel", "gpu__time_duration.sum": 1300.0}
    assert found["launches"] == [pack | {"gpu__time_duration.sum": 1250.0, "lts__throughput": 81.5}, unpack]


# ---- profiled kernels ----


def test_the_profiler_is_told_of_every_kernel_of_ours(gpu):
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
    kernels = {*re.findall(r"\b([a-z_]+_kernel)\b", sources)} - {"upload_kernel", "know_kernel"}
    pattern = gpu.KERNELS.removeprefix("regex:")
    assert len(kernels) > 10 and all(re.match(pattern, kernel) for kernel in kernels)


def test_each_op_has_a_large_case_for_the_profiler(gpu):
    script = load("bench_kernels")
    names = list(script.large(gpu.COUNTED, script.Sizes(1, "cuda")))
    for part in ("pack fp32", "unpack", "acc +=", "wire =", "check+norm bf16", "deposit", "align", "encode"):
        assert any(part in name for name in names), part
    assert not any("1000" in name or "400" in name for name in names)


# ---- windows ----


TINY = models.Shape(width=8, layers=1, heads=2, vocabulary=16, context=4)


def captured(replay_works: bool) -> str:
    """Measure with a fake capture, which runs the function; replays run it again, or do nothing."""
    script = load("bench_windows")

    def capture(run: Any, device: str) -> Any:
        run()
        return run if replay_works else lambda: None

    setting = windows.Setting("gpt", "fp32", ("by_hand",), rounds=1, micro_batches=2)
    with mock.patch.dict(models._SHAPES, gpt=TINY), mock.patch.object(script, "capture", capture):
        row = script.measure(setting)["by_hand, captured"]
    return row.get("failed") or f"{row['window_p50_ms'] > 0} {row['host_min_ms'] > 0}"


def test_a_graph_whose_replays_do_not_train_is_none(ranks):
    assert ranks(1).run(captured, True) == ["True True"]
    (why,) = ranks(1).run(captured, False)
    assert "a replay does not train" in why and "parameters unchanged" in why


def test_calls_are_counted_by_kind_without_the_profilers_own_wait():
    calls = {"cudaLaunchKernel": 3, "cuLaunchKernelEx": 2, "cudaMemcpyAsync": 4, "cudaMemsetAsync": 1}
    calls |= {"cudaEventSynchronize": 6, "cudaDeviceSynchronize": 9, "aten::cumsum": 9, "Memcpy HtoD": 9}
    assert load("bench_windows").launches(calls) == {"launches": 5, "copies": 5, "waits": 6}


def test_without_a_device_it_ends_at_once_and_leaves_what_there_was(gpu, run, monkeypatch):
    monkeypatch.setattr(gpu.subprocess, "run", mock.Mock(return_value=mock.Mock(stdout="")))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "tests"])
    with pytest.raises(SystemExit, match="make gpu DRY=1 runs every command on the processor"):
        gpu.main()
    assert (gpu.LOGS / "started").exists()


def test_an_extension_that_does_not_load_is_built_for_the_device_that_is_here(gpu, run, monkeypatch):
    asked: list[tuple[list[str], dict[str, str]]] = []

    def fake(command, log, limit_s, environment):
        asked.append((list(command), environment))
        log.write_text("")
        return "failed" if len(asked) == 1 else "passed"

    monkeypatch.setattr(gpu, "_run", fake)
    monkeypatch.delenv("PYENGINE_CUDA_ARCHS", raising=False)
    assert gpu.prepare(run, "90")
    build = asked[1]
    assert build[0][1:] == ["setup.py", "build_ext", "--inplace"]
    assert (build[1]["PYENGINE_CUDA_ARCHS"], build[1]["PYENGINE_CUDA"]) == ("90", "1")
    asked[:] = [([], {})]
    assert gpu.prepare(run, "90") and len(asked) == 3  # an extension that loads is not rebuilt


def test_a_step_that_is_asked_for_runs_alone(gpu, run, monkeypatch):
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(gpu, "prepare", lambda *_: True)
    monkeypatch.setattr(
        gpu.Run, "step", lambda _, name, tasks, budget_s: ran.append((name, [task.name for task in tasks]))
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "sanitize", "--dry"])
    assert gpu.main() == 0
    assert ran == [("sanitize", ["memcheck"])]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Run all steps in their tiny form; return the words of every line of the summary."""
    out = tmp_path_factory.mktemp("out")
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={out}", "DRY=1", "ARGS=--budget-s 900"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in (out / "summary.txt").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["extension", "tests", "kernels", "host", "windows", "counters", "sanitize"])
def test_every_command_of_a_step_runs_in_its_tiny_form(step, rehearsed):
    results = [result for name, result, *_ in rehearsed if name.startswith(f"{step}/")]
    assert results and set(results) == {"passed"}
