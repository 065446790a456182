"""`bench`: what pyengine buys on this machine, kernel by kernel and in whole windows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.bench import verdict as bench_verdict
from pyengine.cli.bench.arguments import Kernels, Settings, Steps
from pyengine.cli.bench.kernels.measure import OPS, measure, measure_roofs
from pyengine.cli.bench.report import JsonLines, Report, Tables
from pyengine.cli.bench.windows import measure as windows
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.cli.machine import card, hold_memory
from pyengine.comm.launching import launch


def run(settings: Settings) -> int:
    """Measure, report, and write the result file; return the exit code."""
    report: Report = JsonLines() if settings.json else Tables()
    content = {"machine": _machine(settings), "options": _options(settings)}
    report.start(content["machine"], list(_parts(settings)))
    sentences: list[str] = []
    failed: RuntimeError | None = None
    try:
        if settings.kernels:  # first: without a native core this part ends the run at once
            found, said = _kernels(settings.kernels, report)
            content, sentences = content | found, sentences + said
        if settings.steps:
            found, said = _steps(settings.steps, report, as_json=settings.json)
            content, sentences = content | found, sentences + said
    except RuntimeError as error:  # what was measured before is still worth its time
        failed = error
    finally:
        # A worker that was ended in the middle of its live line has left the cursor hidden behind it.
        sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")
    unwritten = _write(settings.out, content) if sentences and settings.out else None
    if sentences:
        written = settings.out is not None and not unwritten
        report.conclude(sentences, str(settings.out) if written else None)
    problems = [problem for problem in (failed, unwritten) if problem is not None]
    for problem in problems:
        print(problem, file=sys.stderr)
    cases = content.get("cases", {}).values()
    return int(bool(problems) or any("failed" in row for rows in cases for row in rows.values()))


def _write(out: Path, content: dict[str, Any]) -> str | None:
    """Write the result file; return why it could not be."""
    try:
        out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot write {out} ({error.strerror}): only what stands above is left of the measurement"
    return None


def _kernels(kernels: Kernels, report: Report) -> tuple[dict[str, Any], list[str]]:
    """Measure in this process; return what goes into the result file, and what it shows."""
    builds = [build for op in kernels.ops for build in OPS[op](kernels.sizes)]
    report.begin("kernels", len(builds))
    rows = []
    try:
        with _one_thread():
            roofs = measure_roofs(kernels.sizes.megabytes, kernels.seconds, kernels.sizes.device)
            for build in builds:
                rows.append(measure(build, roofs, kernels.seconds, kernels.sizes.device))
                report.advance(len(rows))
    finally:
        report.end()
    report.kernels(roofs, rows)
    return {"roofs_gb_per_s": roofs, "rows": rows}, bench_verdict.on_kernels(rows)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    hold_memory()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _steps(steps: Steps, report: Report, *, as_json: bool) -> tuple[dict[str, Any], list[str]]:
    """Measure on workers; return what goes into the result file, and what it shows."""
    outcome = windows.merged(launch(work, workers=steps.workers, args=(steps.setting, as_json)))
    rows = windows.rows(outcome)
    report.windows(steps.setting.name, outcome.times, rows)
    said = bench_verdict.on_windows(outcome.times)
    said += [f"{VARIANTS[name].label} failed: {why}" for name, why in outcome.failed.items()]
    return {"cases": {steps.setting.name: rows}}, said


def work(setting: windows.Setting, as_json: bool) -> windows.Outcome:
    """Measure windows on this rank; the first one shows how far they are."""
    terminal.show_everything()
    if dist.get_rank() > 0:
        return windows.measure(setting, lambda done: None)
    report: Report = JsonLines() if as_json else Tables()
    report.begin(f"windows, {setting.name}", setting.rounds + windows.WARM_UP)
    try:
        return windows.measure(setting, report.advance)
    finally:
        report.end()


def _machine(settings: Settings) -> dict[str, Any]:
    steps, kernels = settings.steps, settings.kernels
    device = steps.setting.device if steps else kernels.sizes.device if kernels else "cpu"
    machine: dict[str, Any] = dict(card(1, device))
    if steps:
        network = "NCCL" if steps.setting.device == "cuda" else "loopback"
        machine |= {"ranks": steps.workers, "network": network}
    return machine


def _options(settings: Settings) -> dict[str, Any]:
    parts = {"step": settings.steps, "kernels": settings.kernels}
    return {name: asdict(part) for name, part in parts.items() if part}


def _parts(settings: Settings) -> Iterator[str]:
    """Say what is to be measured and how long it takes, as far as that is known before."""
    if settings.kernels:
        kernels = settings.kernels
        number = sum(len(OPS[op](kernels.sizes)) for op in kernels.ops)
        seconds = f"{kernels.seconds:g} s each and their making"
        yield f"kernels: {number} cases on {kernels.sizes.device}, {seconds}"
    if settings.steps:
        steps, setting = settings.steps, settings.steps.setting
        yield (
            f"windows of {setting.name}: {len(setting.variants)} variants on {steps.workers} workers of "
            f"{setting.device}, {setting.rounds} rounds after {windows.WARM_UP} of warm-up"
        )
        for name in steps.left_out:
            yield f"left out: {VARIANTS[name].label}, as {VARIANTS[name].needs} is not installed"
