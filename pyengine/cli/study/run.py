"""`study`: train over numbers of workers and batch sizes on this machine, and report the speed-up."""

from __future__ import annotations

import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch

import pyengine
from pyengine.cli.machine import cpu_name, num_cores
from pyengine.cli.study import plots as study_plots
from pyengine.cli.study import report as study_report
from pyengine.cli.study.analysis import analyse
from pyengine.cli.study.arguments import Settings
from pyengine.cli.study.forecast import Forecast
from pyengine.cli.study.grid import LEAST_STEPS, Cell, Impossible, Plan, cells, plan
from pyengine.cli.study.probe import Run
from pyengine.cli.study.report import Report
from pyengine.cli.study.store import Record, Store
from pyengine.cli.study.supervise import Limits, Outcome, Watch, execute, log_path
from pyengine.cli.target import check
from pyengine.cli.trackers import Trackers
from pyengine.step.step_record import StepRecord

_SOME_FAILED, _NOTHING_MEASURED, _NOT_WRITTEN = 1, 2, 3

# Makes a run, within limits, with a log file; the last argument is called after steps.
Execute = Callable[[Run, Limits, Path, Watch], Outcome]


def run(settings: Settings) -> int:
    check(settings.target)
    report = Report(as_json=settings.json)
    try:
        return study(settings, execute, report)
    except OSError as error:
        if error.filename is None:
            raise  # not of a file of the study but, for example, of stdout
        print(f"the study ended early: {error}; {settings.kept}", file=sys.stderr)
        return _NOT_WRITTEN


def study(settings: Settings, execute: Execute, report: Report) -> int:
    """Make the missing runs, and write the page of all runs; return the exit code.

    Args:
        execute: makes a run.
    """
    plans, impossible = _plans(settings)
    machine = card()
    store = Store(settings.folder, {**settings.binding(), "machine": machine})
    try:
        with report.live():
            forecast = Forecast(plans, threads=settings.threads, cores=int(machine["cores"]))
            _make_runs(settings, plans, impossible, store, execute, report, forecast)
        wanted = {(cell.workers, cell.batch, repeat) for cell in plans for repeat in range(settings.repeats)}
        records = [record for key, record in store.records.items() if key in wanted]
    finally:
        store.close()
    content = _content(settings, machine, records, impossible)
    page = settings.folder / "report.html"
    study_report.write_page(content, page)
    is_tracked = _is_tracked(content) if settings.trackers != Trackers() else True
    report.conclude(content.analysis, page)
    if not is_tracked:
        return _NOT_WRITTEN
    if not content.analysis.cells:
        return _NOTHING_MEASURED
    return _SOME_FAILED if content.analysis.ended else 0


def _is_tracked(content: study_report.Content) -> bool:
    """Write to the trackers; print why if that fails."""
    try:
        track(content.settings.trackers, content)
    except Exception as error:  # noqa: BLE001 - a network or an account can raise anything
        text = f"not all was sent to the trackers: {type(error).__name__}: {error}"
        print(f"{text}; {content.settings.kept}", file=sys.stderr)
        return False
    return True


def track(trackers: Trackers, content: study_report.Content) -> None:
    """Write the steps of every run, the figures and the plots, now that nothing is measured."""
    settings = content.settings
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
            found = {name: getattr(figures, name) for name in _TRACKED}
            values = {f"{name}/batch {cell.batch}": each.mid for name, each in found.items() if each}
            stalls = sum(stall.record.cell == cell for stall in content.analysis.stalls)
            run.log(values | {f"stalls/batch {cell.batch}": stalls}, axis="workers", at=cell.workers)
        for plot in content.plots:
            run.image(plot.title, plot.path)


_TRACKED = (
    "samples_s",
    "batches_s",
    "speed_up",
    "efficiency",
    "sync_share",
    "memory_bytes",
    "cpu_share",
    "accuracy",
    "goal_s",
)


def _step_record(record: Record, step: int) -> StepRecord:
    """Return a step of a run as listeners take it; what runs.jsonl lacks is None, which they leave out."""
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
    """Describe this machine: figures of one study are of one processor, and of the same versions."""
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


def _plans(settings: Settings) -> tuple[dict[Cell, Plan], dict[Cell, str]]:
    plans, impossible = {}, {}
    for cell in cells(settings):
        try:
            plans[cell] = plan(cell, settings)
        except Impossible as reason:
            impossible[cell] = str(reason)
    return plans, impossible


def _make_runs(
    settings: Settings,
    plans: dict[Cell, Plan],
    impossible: dict[Cell, str],
    store: Store,
    execute: Execute,
    report: Report,
    forecast: Forecast,
) -> None:
    """Make a run of every cell, then repeat: drift over hours affects all cells alike."""
    wanted = [(cell, repeat) for repeat in range(settings.repeats) for cell in plans]
    missing = [(cell, repeat) for cell, repeat in wanted if not _is_kept(store, cell, repeat, settings.retry)]
    report.plan(runs=len(missing), kept=len(wanted) - len(missing), impossible=impossible)
    limits = Limits(settings.stall_timeout_s, settings.run_timeout_s)
    (settings.folder / "logs").mkdir(exist_ok=True)
    for record in store.records.values():
        if record.cell in plans:
            forecast.learn(record)
    still = [cell for cell, _ in missing]
    if still and forecast.seconds(still) is None:
        report.begin("trial run")
        forecast.learn(_trial(settings, plans, limits, execute, report))
    if still:
        report.forecast(forecast.seconds(still))
    for cell, repeat in missing:
        report.begin(f"{cell}, repeat {repeat + 1}")
        steps, log = plans[cell].steps, settings.folder / log_path(cell, repeat)
        watch = _watch(report, steps)
        outcome = execute(_run(settings, cell, plans[cell], repeat), limits, log, watch)
        record = _record(cell, repeat, plans[cell], outcome)
        store.add(record)
        forecast.learn(record)
        still.remove(cell)
        report.ran(record, left_s=forecast.seconds(still))


def _trial(
    settings: Settings, plans: dict[Cell, Plan], limits: Limits, execute: Execute, report: Report
) -> Record:
    """Make a few steps of the first cell, for the forecast alone: they are not stored."""
    cell, plan = next(iter(plans.items()))
    run = replace(_run(settings, cell, plan, 0), steps=LEAST_STEPS, evaluate_every=LEAST_STEPS)
    log = settings.folder / "logs" / "trial.txt"
    return _record(cell, 0, plan, execute(run, limits, log, _watch(report, LEAST_STEPS)))


def _watch(report: Report, steps: int) -> Watch:
    return lambda done, accuracy: report.step(done, steps, accuracy)


def _is_kept(store: Store, cell: Cell, repeat: int, retry: bool) -> bool:
    record = store.records.get((cell.workers, cell.batch, repeat))
    return record is not None and (record.is_done or not retry)


def _run(settings: Settings, cell: Cell, plan: Plan, repeat: int) -> Run:
    return Run(
        target=settings.target,
        workers=cell.workers,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        accumulate=plan.accumulate,
        steps=plan.steps,
        dataset_size=settings.dataset_size,
        seed=settings.seed + repeat,
        threads=settings.threads,
        evaluate_every=max(1, plan.steps // settings.evaluations),
        beats="",
    )


def _record(cell: Cell, repeat: int, plan: Plan, outcome: Outcome) -> Record:
    traces = outcome.traces
    first = traces[0] if traces else None
    return Record(
        workers=cell.workers,
        batch=cell.batch,
        repeat=repeat,
        status=outcome.status,
        reason=outcome.reason,
        steps=outcome.steps,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        accumulate=plan.accumulate,
        wall_s=round(outcome.wall_s, 3),
        busy=round(outcome.busy, 3),
        seconds=_rounded(first.seconds if first else ()),
        sync_s=_rounded(
            [statistics.fmean(step) for step in zip(*(trace.sync_s for trace in traces), strict=True)]
        ),
        losses=[_finite(loss) for loss in (first.losses if first else ())],
        accuracy=[(step, _finite(value)) for step, value in (first.accuracy if first else ())],
        cpu_share=_rounded([trace.cpu_s / sum(trace.seconds) for trace in traces]),
        peak_rss_bytes=[trace.peak_rss_bytes for trace in traces],
        bytes_on_wire=first.bytes_on_wire if first else 0,
    )


def _content(
    settings: Settings, machine: dict[str, str | int], records: Sequence[Record], impossible: dict[Cell, str]
) -> study_report.Content:
    analysis = analyse(
        records,
        fixed=settings.fixed,
        threads=settings.threads,
        cores=int(machine["cores"]),
        goal=settings.goal,
    )
    return study_report.Content(
        settings=settings,
        machine=machine,
        records=records,
        impossible=impossible,
        analysis=analysis,
        plots=study_plots.draw(analysis, settings.folder / "plots") if analysis.cells else [],
    )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]  # microseconds


def _finite(value: float | None) -> float | None:
    """Return None for nan, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
