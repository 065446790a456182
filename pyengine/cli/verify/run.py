"""`verify`: train the same few steps on several world sizes, and compare the runs bit for bit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from pyengine.cli import terminal
from pyengine.cli.target import Enough, check
from pyengine.cli.verify.arguments import VerifySettings
from pyengine.cli.verify.compare import Difference, causes, change, compare, first_difference
from pyengine.cli.verify.probe import WRAPS, Run, Trace, VerifyProbe, needs
from pyengine.cli.verify.report import VerifyReport, WorldSizeResult
from pyengine.comm.launching import launch

_FAILED = 2

# Runs functions ("module:function") in turn on the workers of a run, and returns their traces by rank.
Execute = Callable[[Sequence[str], Run], list[list[Trace]]]


@dataclass(frozen=True)
class Done:
    """A finished run; `first` is its first difference from the reference, or None if there is none."""

    run: Run
    ranks: list[Trace]
    first: Difference | None


def run(settings: VerifySettings) -> int:
    for target in settings.subjects.values():
        check(target)
    report = VerifyReport(as_json=settings.json)
    try:
        with report.live():
            return 0 if verify(settings, on_workers, report) else 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return _FAILED


def verify(settings: VerifySettings, execute: Execute, report: VerifyReport) -> bool:
    """Run and report all training functions; return whether all runs of each function are identical."""
    done: dict[str, list[Done]] = {name: [] for name in settings.subjects}
    runs = _runs(settings)
    while runs:
        run = runs.pop(0)
        report.begin(run, still=len(runs))
        begin = time.perf_counter()
        by_rank = execute(list(settings.subjects.values()), run)
        seconds = time.perf_counter() - begin
        for index, (name, before) in enumerate(done.items()):
            ranks = [traces[index] for traces in by_rank]
            reference = before[0].ranks[0] if before else ranks[0]
            first = first_difference(reference, ranks)
            _check(name, settings, Done(run, ranks, first))
            before.append(Done(run, ranks, first))
            report.ran(name, run, ranks[0], seconds, first)
    for name, ended in done.items():
        odd = next((each for each in ended if each.first), None)
        finding = _find_cause(settings.subjects[name], execute, ended[0], odd) if odd else None
        report.conclude(name, finding, ended[0].ranks[0])
    return not any(each.first for ended in done.values() for each in ended)


def on_workers(targets: Sequence[str], run: Run) -> list[list[Trace]]:
    return launch(_work, workers=run.workers, args=(list(targets), run))


def trace(targets: Sequence[str], run: Run) -> list[Trace]:
    torch.set_num_threads(1)
    return [_trace(target, run) for target in targets]


def _work(targets: Sequence[str], run: Run) -> list[Trace]:
    terminal.prepare_output()
    os.dup2(2, 1)  # keeps the output of the functions out of tables and JSON lines
    return trace(targets, run)


def _trace(target: str, run: Run) -> Trace:
    probe = VerifyProbe(run)
    try:
        resolve_name(target)(probe)
    except Enough:
        pass
    except RuntimeError as error:
        # The engine itself raises an error if ranks differ. The digests recorded so far show the place
        # and the cause.
        if probe.trace.steps == 0:
            raise
        probe.trace.stopped = str(error)
    return probe.trace


def _check(name: str, settings: VerifySettings, done: Done) -> None:
    """Raise RuntimeError if a run recorded no step, or failed without a difference from the reference."""
    label, ranks = done.run.label, done.ranks
    if not all(trace.entries for trace in ranks):
        raise RuntimeError(
            f"{name} on {label} never called verify.watch(model, optimizer=optimizer, sync=sync): call "
            "it once on every rank, before the loop"
        )
    if ranks[0].steps == 0:
        raise RuntimeError(
            f"{name} on {label} took no optimizer step after verify.watch: it needs at least one"
        )
    if settings.wraps != WRAPS[:1] and not all(trace.is_wrapped for trace in ranks):
        raise RuntimeError(
            f"got --wrap {','.join(settings.wraps)}, but {name} wraps its model itself: let it call "
            "sync, forward = verify.wrap(model, accumulate=..., accumulator='exact')"
        )
    stopped = next((trace.stopped for trace in ranks if trace.stopped), "")
    if stopped and done.first is None:
        raise RuntimeError(f"{name} on {label} failed after {ranks[0].steps} steps: {stopped}")


def _runs(settings: VerifySettings) -> list[Run]:
    """Return all runs in order, the reference first."""
    is_one = len(settings.wraps) == 1
    first, *others = [
        Run(
            _workers(world) if is_one else f"{wrap}, {_workers(world)}",
            world,
            steps=settings.steps,
            micro_batches=settings.micro_batches,
            accumulator=settings.accumulator,
            wrap=wrap,
            last=settings.steps - 1,
        )
        for wrap in settings.wraps
        for world in settings.workers
        if not needs(wrap, world)
    ]
    return [first, replace(first, label=f"{first.label}, again"), *others]


def _workers(world: int) -> str:
    return "1 worker" if world == 1 else f"{world} workers"


def _find_cause(target: str, execute: Execute, reference: Done, other: Done) -> WorldSizeResult:
    """Repeat two runs up to the first step in which they differ, and compare their tensors."""
    first = other.first
    assert first is not None
    wanted, repeats = _tensors(target, execute, reference, 0, first)
    got, other_repeats = _tensors(target, execute, other, first.rank, first)
    if first.kind == "window":
        elements = f"The window has {first.texts[1]} in this run, and {first.texts[0]} in the reference."
    else:
        key = first.kind, first.name
        elements = compare(wanted.get(key), got.get(key))
    found = causes(
        first,
        repeats=other is not reference and replace(other.run, label="") == replace(reference.run, label=""),
        came_back=repeats and other_repeats,
        micro_batches=reference.run.micro_batches,
        gradient=change(wanted, got),
    )
    return WorldSizeResult(reference.run.label, other.run.label, first, elements, found)


def _tensors(
    target: str, execute: Execute, done: Done, rank: int, first: Difference
) -> tuple[dict[tuple[str, str], Tensor], bool]:
    """Repeat a run; return a rank's tensors of the step, and whether the entry has the same bits again."""
    again = execute([target], replace(done.run, last=first.step, keep=rank))[rank][0]
    key = first.step, first.kind, first.name
    return again.tensors, again.entries.get(key) == done.ranks[rank].entries.get(key)
