"""`verify`: the same few steps on several world sizes, compared bit by bit."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pyengine.cli import terminal
from pyengine.cli.target import Enough, check, load
from pyengine.cli.verify.arguments import Settings
from pyengine.cli.verify.cause import Facts, causes
from pyengine.cli.verify.compare import Difference, change, compare, first_difference
from pyengine.cli.verify.probe import Probe, Run, Trace
from pyengine.cli.verify.report import Finding, JsonLines, Report, Tables
from pyengine.cli.verify.wraps import WRAPS, needs
from pyengine.comm.launching import launch

_BUCKET_CAP_MB, _SMALL_BUCKET_CAP_MB = 25.0, 0.05
_COULD_NOT_TELL = 2

# Runs functions ("module:function") one after the other on all workers of one run: their traces, by rank.
Execute = Callable[[Sequence[str], Run], list[list[Trace]]]


@dataclass(frozen=True)
class Done:
    """A run that has ended: its traces by rank."""

    run: Run
    ranks: list[Trace]


def run(settings: Settings) -> int:
    """Verify every subject; return the exit code."""
    for target in settings.subjects.values():
        check(target)
    report = JsonLines() if settings.json else Tables()
    try:
        with report.live():
            return 0 if verify(settings, on_workers, report) else 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return _COULD_NOT_TELL


def verify(settings: Settings, execute: Execute, report: Report) -> bool:
    """Run everything, report it, and return whether all runs of every subject are identical.

    Args:
        execute: how a run is made.

    Raises:
        RuntimeError: a run failed, or recorded nothing.
    """
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
            _check_steps(name, run, ranks)
            _check_wrap(name, settings, ranks)
            before.append(Done(run, ranks))
            difference = first_difference(before[0].ranks[0], ranks)
            if difference is None and (
                stopped := next((trace.stopped for trace in ranks if trace.stopped), "")
            ):
                raise RuntimeError(f"{name} on {run.label} failed after {ranks[0].steps} steps: {stopped}")
            report.ran(name, run, ranks[0], seconds, difference)
        if not any(traces[0].ranks[0].takes_bucket_cap for traces in done.values()):
            runs = [each for each in runs if each.bucket_cap_mb == _BUCKET_CAP_MB]
    verdicts = [_conclude(name, settings, execute, report, traces) for name, traces in done.items()]
    return all(verdicts)


def on_workers(targets: Sequence[str], run: Run) -> list[list[Trace]]:
    """Run the functions on new local workers."""
    return launch(_work, workers=run.workers, args=(list(targets), run))


def trace(targets: Sequence[str], run: Run) -> list[Trace]:
    """Run the functions on this rank."""
    torch.set_num_threads(1)
    return [_trace(target, run) for target in targets]


def _work(targets: Sequence[str], run: Run) -> list[Trace]:
    terminal.show_everything()
    os.dup2(2, 1)  # what functions print stays out of the tables and the JSON lines
    return trace(targets, run)


def _trace(target: str, run: Run) -> Trace:
    probe = Probe(run)
    try:
        load(target)(probe)
    except Enough:
        pass
    except (
        RuntimeError
    ) as error:  # an engine whose ranks part says so itself: what was recorded tells where and why
        if probe.trace.steps == 0:
            raise
        probe.trace.stopped = str(error)
    return probe.trace


def _check_steps(name: str, run: Run, ranks: Sequence[Trace]) -> None:
    if not all(trace.entries for trace in ranks):
        raise RuntimeError(
            f"{name} on {run.label} never called verify.watch(model, optimizer=optimizer, sync=sync): call "
            "it once on every rank, before the loop"
        )
    if ranks[0].steps == 0:
        raise RuntimeError(
            f"{name} on {run.label} took no optimizer step after verify.watch: it needs at least one"
        )


def _check_wrap(name: str, settings: Settings, ranks: Sequence[Trace]) -> None:
    if settings.wraps != WRAPS[:1] and not all(trace.is_wrapped for trace in ranks):
        raise RuntimeError(
            f"--wrap {','.join(settings.wraps)}, and {name} wraps its model by itself: let it call "
            "sync, forward = verify.wrap(model, accumulate=..., accumulator='exact')"
        )


def _runs(settings: Settings) -> list[Run]:
    """Return the runs in order; the first one is the reference."""
    base = Run(
        "",
        0,
        wrap=settings.wraps[0],
        steps=settings.steps,
        micro_batches=settings.micro_batches,
        accumulator=settings.accumulator,
        bucket_cap_mb=_BUCKET_CAP_MB,
        last=settings.steps - 1,
        slots=settings.slots,
    )
    is_one = len(settings.wraps) == 1
    first, *others = [
        replace(
            base, label=_workers(world) if is_one else f"{wrap}, {_workers(world)}", workers=world, wrap=wrap
        )
        for wrap in settings.wraps
        for world in settings.workers
        if not needs(wrap, world)
    ]
    runs = [first, replace(first, label=f"{first.label}, again"), *others]
    several = [run for run in (first, *others) if run.workers > 1]
    small = [
        replace(run, label=f"{run.label}, small buckets", bucket_cap_mb=_SMALL_BUCKET_CAP_MB)
        for run in several[:1]
    ]
    return [*runs, *small]


def _workers(world: int) -> str:
    return "1 worker" if world == 1 else f"{world} workers"


def _conclude(name: str, settings: Settings, execute: Execute, report: Report, done: Sequence[Done]) -> bool:
    """Explain the first run that differs, if there is one; return whether there is none."""
    reference = done[0]
    for other in done:
        first = first_difference(reference.ranks[0], other.ranks)
        if first is not None:
            look = _Look(settings.subjects[name], list(settings.subjects).index(name), execute)
            report.conclude(name, look.at(reference, other, first), done[0].ranks[0])
            return False
    report.conclude(name, None, done[0].ranks[0])
    return True


@dataclass(frozen=True)
class _Look:
    """Repeats two runs up to the step in which they part, and compares their tensors."""

    target: str
    index: int
    execute: Execute

    def at(self, reference: Done, other: Done, first: Difference) -> Finding:
        with tempfile.TemporaryDirectory(prefix="pyengine-") as folder:
            ours, same = self._tensors(reference, 0, first, Path(folder) / "ours")
            theirs, same_too = self._tensors(other, first.rank, first, Path(folder) / "theirs")
            key = first.kind, first.name
            elements = None if first.kind == "window" else compare(ours.get(key), theirs.get(key))
            gradient = change(ours, theirs)
        facts = Facts(
            first,
            repeats=other is not reference and _is_repeat(reference.run, other.run),
            came_back=same and same_too,
            threads=tuple(trace.threads for trace in (*reference.ranks, *other.ranks)),
            micro_batches=reference.run.micro_batches,
            gradient=gradient,
        )
        return Finding(reference.run.label, other.run.label, first, elements, causes(facts))

    def _tensors(
        self, done: Done, rank: int, first: Difference, folder: Path
    ) -> tuple[dict[tuple[str, str], Tensor], bool]:
        """Return a rank's tensors of the step, and whether its entry in question came back."""
        folder.mkdir()
        again = self.execute([self.target], replace(done.run, last=first.step, keep=str(folder)))[rank][0]
        key = first.step, first.kind, first.name
        path = folder / f"{rank}.pt"
        tensors: dict[tuple[str, str], Tensor] = torch.load(path, weights_only=True) if path.exists() else {}
        return tensors, again.entries.get(key) == done.ranks[rank].entries.get(key)


def _is_repeat(one: Run, other: Run) -> bool:
    return replace(one, label="") == replace(other, label="")
