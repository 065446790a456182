"""`bench`: time kernels and whole windows on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.bench.arguments import Kernels, Settings, Steps
from pyengine.cli.bench.kernels.measure import OPS, measure, measure_roofs
from pyengine.cli.bench.report import Report, on_kernels, on_windows
from pyengine.cli.bench.windows import measure as windows
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.cli.files import written
from pyengine.cli.machine import card, hold_memory
from pyengine.comm.launching import launch


def run(settings: Settings) -> int:
    report = Report(as_json=settings.json)
    parts = {"step": settings.steps, "kernels": settings.kernels}
    options = {name: asdict(part) for name, part in parts.items() if part}
    content = {"machine": _machine(settings), "options": options}
    report.start(content["machine"], list(_parts(settings)))
    sentences: list[str] = []
    problems: list[str] = []
    try:
        if settings.kernels:  # first: without a native core this part raises at once
            found, conclusions = _kernels(settings.kernels, report)
            content, sentences = content | found, sentences + conclusions
        if settings.steps:
            found, conclusions = _steps(settings.steps, report, as_json=settings.json)
            content, sentences = content | found, sentences + conclusions
    except RuntimeError as error:  # the part before is reported
        if (code := terminal.exit_code_of_worker(error)) is not None:
            return code
        problems.append(str(error))
    if "rows" in content or "cases" in content:  # a part has ended, if without anything to compare
        out = settings.out
        if out is not None:
            try:
                with written(out) as part:
                    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                problems.append(f"cannot write {out} ({error.strerror}): the results above are not saved")
                out = None
        report.conclude(sentences, None if out is None else str(out))
    for problem in problems:
        print(problem, file=sys.stderr)
    cases = content.get("cases", {}).values()
    return int(bool(problems) or any("failed" in row for rows in cases for row in rows.values()))


def _kernels(kernels: Kernels, report: Report) -> tuple[dict[str, Any], list[str]]:
    """Measure in this process; return the content of the result file, and sentences."""
    builds = [build for op in kernels.ops for build in OPS[op](kernels.sizes)]
    report.begin("kernels", len(builds))
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hold_memory()
    try:
        roofs = measure_roofs(kernels.sizes.megabytes, kernels.seconds, kernels.sizes.device)
        for build in builds:
            rows.append(measure(build, roofs, kernels.seconds, kernels.sizes.device))
            report.advance(len(rows))
    finally:
        torch.set_num_threads(threads)
        report.end()
    report.kernels(roofs, rows)
    return {"roofs_gb_per_s": roofs, "rows": rows}, on_kernels(rows)


def _steps(steps: Steps, report: Report, *, as_json: bool) -> tuple[dict[str, Any], list[str]]:
    """Measure on workers; return the content of the result file, and sentences."""
    outcome = windows.merged(launch(work, workers=steps.workers, args=(steps.setting, as_json)))
    rows = windows.rows(outcome)
    report.windows(steps.setting.name, outcome.times, rows)
    sentences = on_windows(outcome.times)
    sentences += [f"{VARIANTS[name].label} failed: {why}" for name, why in outcome.failed.items()]
    return {"cases": {steps.setting.name: rows}}, sentences


def work(setting: windows.Setting, as_json: bool) -> windows.Outcome:
    """Measure windows on this rank; the first one reports the progress."""
    terminal.prepare_output()
    report = Report(as_json=as_json, is_silent=dist.get_rank() > 0)
    with terminal.ends_with_output():
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


def _parts(settings: Settings) -> Iterator[str]:
    """Yield a sentence on each part: what is measured, and how long it takes."""
    if settings.kernels:
        kernels = settings.kernels
        number = sum(len(OPS[op](kernels.sizes)) for op in kernels.ops)
        seconds = f"{kernels.seconds:g} s each and their setup"
        yield f"kernels: {number} cases on {kernels.sizes.device}, {seconds}"
    if settings.steps:
        steps, setting = settings.steps, settings.steps.setting
        yield (
            f"windows of {setting.name}: {len(setting.variants)} variants on {steps.workers} workers of "
            f"{setting.device}, {setting.rounds} rounds after {windows.WARM_UP} of warm-up"
        )
