"""`bench`: time whole windows on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.bench import measure
from pyengine.cli.bench.arguments import BenchSettings
from pyengine.cli.bench.report import BenchReport, on_windows
from pyengine.cli.bench.variants import VARIANTS
from pyengine.cli.files import written
from pyengine.cli.machine import card
from pyengine.comm.launching import launch


def run(settings: BenchSettings) -> int:
    report = BenchReport(as_json=settings.json)
    device = settings.cases[0].device
    network = "NCCL" if device == "cuda" else "loopback"
    machine = card(1, device) | {"ranks": settings.workers, "network": network}
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    sentences: list[str] = []
    problems: list[str] = []
    report.start(machine, [_plan(case, settings.workers) for case in settings.cases])
    for case in settings.cases:
        try:
            outcome = measure.merged(launch(work, workers=settings.workers, args=(case, settings.json)))
        except RuntimeError as error:  # the report still includes earlier cases
            if (code := terminal.exit_code_of_worker(error)) is not None:
                return code
            problems.append(str(error))
            break
        cases[case.name] = rows = measure.rows(outcome)
        report.windows(case.name, outcome.times, rows)
        found = on_windows(outcome.times)
        found += [f"{VARIANTS[name].label} failed: {why}" for name, why in outcome.failed.items()]
        sentences += found if len(settings.cases) == 1 else [f"{case.name}: {text}" for text in found]
    if cases:
        options = {"workers": settings.workers, "cases": [asdict(case) for case in settings.cases]}
        content = {"machine": machine, "options": options, "cases": cases}
        out = settings.out and _saved(settings.out, content, problems)
        report.conclude(sentences, None if out is None else str(out))
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems) or any("failed" in row for rows in cases.values() for row in rows.values()))


def _plan(case: measure.Setting, workers: int) -> str:
    return (
        f"windows of {case.name}: {len(case.variants)} variants on {workers} workers of {case.device}, "
        f"{case.rounds} rounds after {measure.WARM_UP} warm-up rounds"
    )


def _saved(out: Path, content: dict[str, Any], problems: list[str]) -> Path | None:
    """Write the result file and return its path; if that fails, append to `problems` and return None."""
    try:
        with written(out) as part:
            part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        problems.append(f"cannot write {out} ({error.strerror}): the results above are not saved")
        return None
    return out


def work(case: measure.Setting, as_json: bool) -> measure.Measurements:
    """Measure windows on this rank; rank 0 reports the progress."""
    terminal.prepare_output()
    report = BenchReport(as_json=as_json, is_silent=dist.get_rank() > 0)
    with terminal.ends_with_output():
        report.begin(f"windows, {case.name}", case.rounds + measure.WARM_UP)
        try:
            return measure.measure(case, report.advance)
        finally:
            report.end()
