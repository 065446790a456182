"""Run everything that needs a CUDA machine, in steps that take at most ten minutes each.

    make gpu                    # every step, the most valuable first
    make gpu STEP=tests         # one step: tests, kernels, host, windows, counters
                                # or sanitize
    make gpu DRY=1              # a tiny form of every step's commands on the CPU, without a GPU

A step continues after a task has failed. The script prints a line per task, and a table at the end. The exit
code is 1 if anything failed, ran out of time or could not run. Tasks write result files while they run. If an
extension loads and has CUDA kernels, it is used as it is. Otherwise, an extension is built in place for the
device of this machine.

The environment variable OUT may name a folder. After every task, three files are copied to it: a summary, all
logs, and an archive of the new result files. Unpack the archive in the root of the repository.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, LOGS = ROOT / "benchmarks" / "results", ROOT / "build" / "gpu"
PYTHON = sys.executable
BUDGET_S, LEAST_S = 540, 5  # seconds per step; a task starts only if `LEAST_S` are left
SECONDS_A_CASE = "0.3"

# Model, dtype and micro-batches of the windows, the most informative first.
CASES = (
    *("gpt124-long:fp32:8", "gpt124:bf16:8", "small:fp32:8", "gpt124-short:bf16:8", "gpt124:fp32:8"),
    *("gpt124:fp16:8", "small:bf16:8", "gpt124:bf16:1", "small:fp32:1", "gpt124:fp32:1"),
)
COUNTED = ("accumulate", "unscale_norm", "pack", "exact", "codec")  # each of their cases launches one kernel
STEMS = (*COUNTED, "chain")
TOOLS = ("memcheck", "racecheck")
# About twenty tests, which run every kernel over short and long lists. More tests would take too long,
# because each tensor is a separate allocation.
SANITIZED = (
    "300 or nothing or again or long_sum or in_the_tail or many-3 or (plain_pytorch and int8-256 and 1025)"
)
SANITIZED_FILES = tuple(f"tests/ops/test_{name}.py" for name in ("cuda", "exact_cuda", "codec_cuda"))
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors_op_write.sum",
    "lts__t_requests_srcunit_tex.sum",
    "smsp__inst_executed_pipe_xu.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
KERNELS = "regex:^(pack|unpack|accumulate|accumulate_cast|unscale_norm|exact_[a-z]+|codec_[a-z_]+)_kernel$"


@dataclass(frozen=True)
class Task:
    """A command of a step.

    Attributes:
        dry: a tiny form of the same command, for the CPU.
        limit_s: seconds after which the task is terminated.
        tell: takes the log, and returns a text for the summary and whether the task has succeeded.
        then: called after the task, even if the task has failed.
    """

    name: str
    command: Sequence[str]
    dry: Sequence[str]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    tell: Callable[[str], tuple[str, bool]] = lambda log: (_last_line(log), True)
    then: Callable[[], object] = lambda: None


def steps(*, is_dry: bool = False) -> dict[str, list[Task]]:
    """Return the tasks by step, the most valuable step first.

    A rehearsal runs only one of several similar tasks, and measures all ops in one process.
    """
    cases, tools = (CASES[:1], TOOLS[:1]) if is_dry else (CASES, TOOLS)
    return {
        "tests": _tests(),
        "kernels": [_kernels(*STEMS)] if is_dry else [_kernels(stem) for stem in STEMS],
        "host": [_host()],
        "windows": [_windows(case) for case in cases],
        "counters": [_counters()],
        "sanitize": [_sanitizer(tool) for tool in tools],
    }


def _tests() -> list[Task]:
    doctor = [PYTHON, "-m", "pyengine", "doctor"]
    several = ["-n", "8"] if importlib.util.find_spec("xdist") and (os.cpu_count() or 1) >= 8 else []
    return [
        Task("doctor", doctor, [*doctor, "--help"], 60),
        _pytest("ops", ["tests/ops"], 240, several),
        _pytest("engine", engine_files(), 260, several),
    ]


def engine_files() -> list[str]:
    """Return the files outside tests/ops with tests for a GPU; collecting all tests would take long."""
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.parent.name != "ops" and "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    # Tests of the engine on a device come before tests that only touch a device.
    return sorted(found, key=lambda path: "distributed" not in path)


def _pytest(name: str, paths: Sequence[str], limit_s: int, more: Sequence[str]) -> Task:
    run = [PYTHON, "-m", "pytest", "-v", "-m", "gpu", "--maxfail=20", *more, *paths]
    return Task(name, run, _collect(run), limit_s, tell=_tests_told)


def _collect(run: Sequence[str]) -> list[str]:
    """Return a command that collects the tests without running them; on a CPU they would be skipped."""
    return [*run[run.index(PYTHON) :], "--collect-only", "-q"]


def _kernels(*stems: str) -> Task:
    script = [PYTHON, "benchmarks/bench_kernels.py", *stems, "--device"]
    run = [*script, "cuda", "--seconds", SECONDS_A_CASE, "--save"]
    dry = [*script, "cpu", "--seconds", "0.001", "--megabytes", "1"]
    return Task("-".join(stems), run, dry, 120, tell=_targets_told)


def _host() -> Task:
    script = [PYTHON, "benchmarks/bench_host.py", "--device"]
    dry = [*script, "cpu", "--parameters", "10", "--accumulate", "1", "--rounds", "3"]
    return Task("host", [*script, "cuda", "--rounds", "20", "--save"], dry, 300)


def _windows(case: str) -> Task:
    model, dtype, _ = case.split(":")
    # A window of 1000 small parameters takes the host half a second.
    few = ["--rounds", "3", "--variants", "engine,no_sync_view,attach,by_hand"] if model == "small" else []
    if model == "gpt124-long":  # each variant is compiled
        few = ["--variants", "engine,no_sync_view,attach,floor,by_hand"]
    script = [PYTHON, "benchmarks/bench_windows.py"]
    tiny = [f"small0:{dtype}:1", "--device", "cpu", "--rounds", "3", "--world", "1"]
    dry = [*script, *tiny, "--variants", "engine,no_sync_view,by_hand"]
    return Task(case, [*script, case, *few, "--save"], dry, 200)


def _counters() -> Task:
    script = [PYTHON, "benchmarks/bench_kernels.py", *COUNTED, "--once", str(LOGS / "cases.json"), "--device"]
    ncu = ["ncu", "--csv", "--metrics", ",".join(METRICS), "--print-units", "base", "--clock-control", "none"]
    ncu += ["--profile-from-start", "off", "--target-processes", "all", "--kernel-name", KERNELS]
    ncu += ["--log-file", str(LOGS / "ncu.csv")]
    run = [*ncu, *script, "cuda", "--megabytes", "512"]  # 2^27 elements of float32
    dry = [*script, "cpu", "--megabytes", "1"]
    return Task("ncu", run, dry, 420, then=save_counters)


def _sanitizer(tool: str) -> Task:
    run = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    run += [PYTHON, "-m", "pytest", "-v", "-m", "gpu", "-x", "-k", SANITIZED, *SANITIZED_FILES]
    # The tools do not detect an overrun inside a block of the caching allocator.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Task(tool, run, _collect(run), 250, alone, tell=_tests_told)


# ---- summaries of logs ----


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].strip()[:100] if lines else ""


def _tests_told(log: str) -> tuple[str, bool]:
    """Count the outcomes, including those of an interrupted run; a run fails if no test has passed."""
    if "tests collected" in log:
        return _last_line(log), True
    counts = {
        word.lower(): sum(word in line for line in log.splitlines() if "%]" in line)
        for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count), counts["passed"] > 0


def _targets_told(log: str) -> tuple[str, bool]:
    met, missed = (len(re.findall(rf"^{word} ", log, re.MULTILINE)) for word in ("met", "MISS"))
    return f"{met} targets met, {missed} missed" if met + missed else _last_line(log), True


# ---- result files ----


def save_counters() -> None:
    """Write the counters of ncu to a result file."""
    path, cases = LOGS / "ncu.csv", LOGS / "cases.json"
    rows = counters(path.read_text()) if path.exists() else []
    if rows and cases.exists():
        content = json.loads(cases.read_text())
        names = content.pop("cases")
        if len(names) == len(rows):  # otherwise, a case has launched more than one kernel
            rows = [{"case": name} | row for name, row in zip(names, rows, strict=True)]
        file = RESULTS / f"{datetime.date.today()}-counters-cuda.json"
        file.write_text(json.dumps(content | {"launches": rows}, indent=2) + "\n")


def counters(text: str) -> list[dict[str, str | float]]:
    """Return a row per launch, with its metrics by name, from the CSV that ncu writes."""
    import csv

    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, str | float]] = {}
    for row in csv.DictReader(lines):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"]})
        launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


# ---- the run ----


@dataclass
class Run:
    """Runs tasks one after the other, within the time budget of a step."""

    is_dry: bool
    out: Path | None
    lines: list[str] = field(default_factory=list)
    has_failed: bool = False

    def step(self, name: str, tasks: Sequence[Task], budget_s: float) -> None:
        """Run the tasks of a step while there is time."""
        end = time.monotonic() + budget_s
        for task in tasks:
            self.task(f"{name}/{task.name}", task, end - time.monotonic())

    def task(self, name: str, task: Task, left_s: float) -> bool:
        """Run a task, and print a line with its result; return whether the task has passed."""
        log, begin = LOGS / f"{name.replace('/', '-').replace(':', '-')}.log", time.monotonic()
        command = task.dry if self.is_dry else task.command
        if left_s < LEAST_S:
            result, told = "no time", ""
        elif shutil.which(command[0], path=_environment()["PATH"]) is None:
            result, told = "missing", f"{command[0]} is not on PATH"
        else:
            result = _run(command, log, min(left_s, task.limit_s), _environment() | task.environment)
            text = log.read_text(errors="replace")
            told, is_well = task.tell(text)
            result = result if is_well or result != "passed" else "failed"
            task.then()
            if result != "passed":
                print(*text.splitlines()[-25:], sep="\n")
        self.has_failed |= result != "passed"
        self.lines.append(f"{name:24} {result:10} {time.monotonic() - begin:5.0f} s  {told}")
        print(self.lines[-1], flush=True)
        self._copy_out()
        return result == "passed"

    def _copy_out(self) -> None:
        """Copy the results so far to `out`, in three files."""
        (LOGS / "summary.txt").write_text("\n".join(self.lines) + "\n")
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(LOGS / "summary.txt", self.out)
        logs = [
            f"==> {path.name}\n{path.read_text(errors='replace')[-(10**6) :]}" for path in LOGS.glob("*.log")
        ]
        (self.out / "gpu.log").write_text("\n".join(sorted(logs)))
        with tarfile.open(self.out / "results.tar", "w") as archive:
            for path in RESULTS.glob("*.json"):
                if path.stat().st_mtime >= (LOGS / "started").stat().st_mtime:
                    archive.add(path, path.relative_to(ROOT))


def _run(command: Sequence[str], log: Path, limit_s: float, environment: dict[str, str]) -> str:
    """Run a command; when its time is over, terminate it and all processes that it has started."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _environment() -> dict[str, str]:
    """Return the environment of every task."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    own = {"PYTHONUNBUFFERED": "1", "PYENGINE_CUDA": "1", "PATH": path}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    names = [name for _, name in socket.if_nameindex()]
    # If loopback is the only network interface, gloo and NCCL do not find it by themselves.
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if names == ["lo"] else {}
    return alone | os.environ | own


_LOADS = """
import sys
from pyengine.ops import native
core = native.core()
has_cuda = getattr(core, "has_cuda", False)
print("CUDA kernels:", has_cuda, getattr(core, "__file__", "no core"))
raise SystemExit(not (has_cuda or "dry" in sys.argv))
"""
_ARCH = "import torch; print('%d%d' % torch.cuda.get_device_capability())"


def device() -> str:
    """Return the architecture of this machine's CUDA device; exit if there is none."""
    arch = subprocess.run([PYTHON, "-c", _ARCH], capture_output=True, text=True, check=False).stdout.strip()
    return arch or sys.exit(
        "torch finds no CUDA device here; make gpu DRY=1 runs every command on the processor"
    )


def prepare(run: Run, arch: str) -> bool:
    """Find an extension that loads and has CUDA kernels, or build one; return whether this succeeded."""
    loads = [PYTHON, "-c", _LOADS]
    # A rehearsal needs no CUDA kernels, and builds none.
    load = Task("load", loads, [*loads, "dry"], 60)
    if run.is_dry:
        return run.task("extension/load", load, load.limit_s)
    if _run(loads, LOGS / "extension-found.log", 60, _environment()) == "passed":
        return run.task("extension/load", load, load.limit_s)
    # Build only for this device, because other architectures would triple the build time.
    only = {"PYENGINE_CUDA_ARCHS": os.environ.get("PYENGINE_CUDA_ARCHS", arch)}
    build = [PYTHON, "setup.py", "build_ext", "--inplace"]
    run.task("extension/build", Task("build", build, build, 300, only), 300)
    return run.task("extension/load", load, load.limit_s)


def main() -> int:
    """Run the chosen steps; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="?", choices=tuple(steps()), help="run only this step")
    parser.add_argument("--only", metavar="A,B", help="run only the tasks with these names")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds of a step (default: 540)")
    parser.add_argument("--dry", action="store_true", help="run tiny commands on the processor")
    options = parser.parse_args()
    arch = "" if options.dry else device()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    (LOGS / "started").touch()
    out = os.environ.get("OUT")
    run = Run(options.dry, Path(out) if out else None)
    begin = time.monotonic()
    if not prepare(run, arch):
        return 1
    for name, tasks in steps(is_dry=options.dry).items():
        chosen = [task for task in tasks if not options.only or task.name in options.only.split(",")]
        if options.step in (None, name):
            # The time of a single step includes the time of the build.
            run.step(name, chosen, options.budget_s - (time.monotonic() - begin if options.step else 0))
    print("\n" + "\n".join(run.lines) + f"\nall: {time.monotonic() - begin:.0f} s")
    return int(run.has_failed)


if __name__ == "__main__":
    sys.exit(main())
