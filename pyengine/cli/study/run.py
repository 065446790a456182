"""`study`: train with several numbers of workers and batch sizes on this machine, and report the speed-up."""

from __future__ import annotations

import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

import pyengine
from pyengine.cli.arguments import writing
from pyengine.cli.files import make_folder
from pyengine.cli.machine import cpu_name
from pyengine.cli.noise import Range
from pyengine.cli.study import plots as study_plots
from pyengine.cli.study import report as study_report
from pyengine.cli.study.analysis import analyse
from pyengine.cli.study.arguments import StudySettings
from pyengine.cli.study.grid import LEAST_STEPS, WARM_UP_STEPS, Cell, Impossible, Plan, cells, plan
from pyengine.cli.study.probe import Run, Trace
from pyengine.cli.study.report import StudyReport
from pyengine.cli.study.store import Key, Record, Store
from pyengine.cli.study.supervise import RunOutcome, Watch, execute, log_path
from pyengine.cli.target import check
from pyengine.comm.launching import num_cores
from pyengine.step.step_record import StepRecord

_SOME_FAILED, _NOTHING_MEASURED, _NOT_WRITTEN = 1, 2, 3

# Executes a run with a log file; the last argument is a callback for progress.
Execute = Callable[[Run, Path, Watch], RunOutcome]


def run(settings: StudySettings) -> int:
    check(settings.target)
    report = StudyReport(as_json=settings.json)
    try:
        return study(settings, execute, report)
    except OSError as error:
        if error.filename is None:
            raise  # the error is not about a file of the study but, for example, about stdout
        print(f"the study ended early: {error}; {settings.kept}", file=sys.stderr)
        return _NOT_WRITTEN


def study(settings: StudySettings, execute: Execute, report: StudyReport) -> int:
    """Perform the missing runs with `execute`, write the report of all runs, and return the exit code."""
    plans: dict[Cell, Plan] = {}
    impossible: dict[Cell, str] = {}
    for cell in cells(settings):
        try:
            plans[cell] = plan(cell, settings)
        except Impossible as reason:
            impossible[cell] = str(reason)
    machine = card()
    wanted = [(cell.workers, cell.batch, repeat) for repeat in range(settings.repeats) for cell in plans]
    shared = {**settings.binding(), "machine": machine}
    with closing(Store(settings.folder, shared)) as store, report.live():
        for name in ("logs", "plots"):
            with writing("--out", f"write to {settings.folder / name}"):
                make_folder(settings.folder / name)
        kept = {key for key, record in store.records.items() if record.is_done or not settings.retry}
        missing = [key for key in wanted if key not in kept]
        report.plan(runs=len(missing), kept=len(wanted) - len(missing), impossible=impossible)
        _Runs(settings, plans, store, execute, report, cores=int(machine["cores"])).make(missing)
        records = [store.records[key] for key in wanted if key in store.records]
    analysis = analyse(
        records,
        fixed=settings.fixed,
        threads=settings.threads,
        cores=int(machine["cores"]),
        goal=settings.goal,
    )
    plots = study_plots.draw(analysis, settings.folder / "plots") if analysis.cells else []
    content = study_report.Content(settings, machine, records, impossible, analysis, plots)
    page = settings.folder / "report.html"
    study_report.write_page(content, page)
    is_tracked = _is_tracked(content)
    report.conclude(analysis, page)
    if not is_tracked:
        return _NOT_WRITTEN
    if not analysis.cells:
        return _NOTHING_MEASURED
    return _SOME_FAILED if analysis.ended else 0


def _is_tracked(content: study_report.Content) -> bool:
    """Write to the trackers; if writing fails, print the reason and return False."""
    try:
        track(content)
    except Exception as error:  # noqa: BLE001 - a network or an account can raise anything
        text = f"not everything was sent to the trackers: {type(error).__name__}: {error}"
        print(f"{text}; {content.settings.kept}", file=sys.stderr)
        return False
    return True


def track(content: study_report.Content) -> None:
    """Write the steps of every run, the figures and the plots to the trackers, after all measurements."""
    settings, trackers = content.settings, content.settings.trackers
    for record in content.records:
        names = ("workers", "batch", "repeat", "status", "global_batch", "micro_batch", "accumulate")
        config = {name: getattr(record, name) for name in names} | content.machine
        with trackers.run(
            log_path(record.cell, record.repeat).stem, group=settings.subject, config=config
        ) as run:
            for step in range(len(record.seconds)):
                run(_step_record(record, step))
            for step, accuracy in record.accuracy:
                if accuracy is not None:
                    run.log({"study/accuracy": accuracy}, axis="pyengine/step", at=step)
    config = {**settings.binding(), **content.machine}
    with trackers.run("figures", group=settings.subject, config=config) as run:
        for cell, figures in content.analysis.cells.items():
            found = {name: each.mid for name, each in vars(figures).items() if isinstance(each, Range)}
            values = {f"{name}/batch {cell.batch}": mid for name, mid in found.items()}
            stalls = sum(stall.record.cell == cell for stall in content.analysis.stalls)
            run.log(values | {f"stalls/batch {cell.batch}": stalls}, axis="workers", at=cell.workers)
        for plot in content.plots:
            run.image(plot.title, plot.path)


def _step_record(record: Record, step: int) -> StepRecord:
    """Return a step of a run as a `StepRecord`; fields not in runs.jsonl are None, which listeners skip."""
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(StepRecord))
    values |= {
        "step": step,
        "micro_batches": record.workers * record.accumulate,
        "count": record.global_batch,
        "loss": record.losses[step],
        "bytes_on_wire": record.bytes_on_wire,
        "exposed_sync_s": record.sync_s[step],
        "step_s": record.seconds[step],
    }
    return StepRecord(**values)


def card() -> dict[str, str | int]:
    """Describe this machine and its software versions, which must be equal for all runs of a study."""
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "physical_cores": psutil.cpu_count(logical=False) or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyengine": pyengine.__version__,
    }


class _Runs:
    """Performs runs one after another, and forecasts the time of the remaining runs.

    A cell that has run before is expected to take the same time again; the times of other cells are
    extrapolated from the nearest cell that has run. The time of a step is assumed to be proportional to a
    worker's samples and, if there are more threads than cores, to the number of threads.
    """

    def __init__(
        self,
        settings: StudySettings,
        plans: dict[Cell, Plan],
        store: Store,
        execute: Execute,
        report: StudyReport,
        *,
        cores: int,
    ) -> None:
        self._settings, self._plans, self._store, self._report = settings, plans, store, report
        self._execute, self._cores = execute, cores
        # Finished runs for the forecast of later runs, including a trial run with fewer steps.
        self._done = [each for each in store.records.values() if each.is_done and each.cell in plans]

    def make(self, missing: Sequence[Key]) -> None:
        """Run every cell once, then every cell again, so that drift over hours affects all cells equally."""
        still = [Cell(workers, batch) for workers, batch, _ in missing]
        if still and not self._done:
            first = next(iter(self._plans))
            trial = replace(self._plans[first], steps=LEAST_STEPS)
            self._run(first, 0, trial, "trial run", Path("logs", "trial.txt"))
        if still:
            self._report.forecast(self._forecast(still))
        for workers, batch, repeat in missing:
            cell = Cell(workers, batch)
            name = f"{cell}, repeat {repeat + 1}"
            record = self._run(cell, repeat, self._plans[cell], name, log_path(cell, repeat))
            self._store.add(record)
            still.remove(cell)
            self._report.ran(record, left_s=self._forecast(still))

    def _run(self, cell: Cell, repeat: int, plan: Plan, name: str, log: Path) -> Record:
        settings, report = self._settings, self._report
        report.begin(name)
        run = Run(
            target=settings.target,
            workers=cell.workers,
            **asdict(plan),
            dataset_size=settings.dataset_size,
            seed=settings.seed + repeat,
            threads=settings.threads,
            evaluate_every=max(1, plan.steps // settings.evaluations),
            stall_timeout_s=settings.stall_timeout_s,
            run_timeout_s=settings.run_timeout_s,
            beats="",
        )
        watch = partial(report.step, plan.steps)
        outcome = self._execute(run, settings.folder / log, watch)
        record = _record(cell, repeat, plan, outcome)
        if record.is_done:
            self._done.append(record)
        return record

    def _forecast(self, cells: Iterable[Cell]) -> float | None:
        """Return the total seconds of one run per cell; None before any run has finished."""
        return sum(map(self._run_s, cells)) if self._done else None

    def _run_s(self, cell: Cell) -> float:
        plan = self._plans[cell]
        same = [each.wall_s for each in self._done if (each.cell, each.steps) == (cell, plan.steps)]
        if same:
            return statistics.median(same)
        near = min(
            self._done, key=lambda each: (abs(each.workers - cell.workers), abs(each.batch - cell.batch))
        )
        samples = plan.micro_batch * plan.accumulate / (near.micro_batch * near.accumulate)
        step_s = statistics.median(near.seconds[WARM_UP_STEPS:])
        load = self._load(cell.workers) / self._load(near.workers)
        return near.wall_s - sum(near.seconds) + plan.steps * step_s * samples * load

    def _load(self, workers: int) -> float:
        return max(1.0, workers * self._settings.threads / self._cores)


def _record(cell: Cell, repeat: int, plan: Plan, outcome: RunOutcome) -> Record:
    traces = outcome.traces
    first = traces[0] if traces else Trace()
    return Record(
        **asdict(cell),
        repeat=repeat,
        status=outcome.status,
        reason=outcome.reason,
        **(asdict(plan) | {"steps": outcome.steps}),
        wall_s=round(outcome.wall_s, 3),
        busy=round(outcome.busy, 3),
        seconds=_rounded(first.seconds),
        sync_s=_rounded(
            [statistics.fmean(step) for step in zip(*(trace.sync_s for trace in traces), strict=True)]
        ),
        losses=[_finite(loss) for loss in first.losses],
        accuracy=[(step, _finite(value)) for step, value in first.accuracy],
        cpu_share=_rounded([trace.cpu_s / sum(trace.seconds) for trace in traces]),
        peak_rss_bytes=[trace.peak_rss_bytes for trace in traces],
        bytes_on_wire=first.bytes_on_wire,
        noise_scale=_finite(first.noise_scale),
        noise_spread=_finite(first.noise_spread),
    )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]  # round to microseconds


def _finite(value: float | None) -> float | None:
    """Return None for infinity and NaN, which JSON does not support."""
    return value if value is not None and math.isfinite(value) else None
