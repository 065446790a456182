"""Measure the time that an audit adds to the windows of a loop, and count its false alarms.

    python benchmarks/bench_audit.py --save               # the GPT of `bench`: every=1 and every=100
    python benchmarks/bench_audit.py --clean 100000 --save  # count alarms in clean, checked windows

There are two gloo workers with one thread each. Three engines with separate models take turns, window by
window: without an audit, with an audit in every window, and with an audit in every 100th. The cost of
`every=100` is that of its unchecked windows, plus a hundredth of what a checked window costs in addition.

A window's time is that of the slower worker. On a machine that others share, the times of two windows differ
by some percent. Therefore `spends` is reported too: the time inside the audit's calls, divided by the time of
the window without an audit. It is measured on the worker that arrives last, which does not wait for the
other worker, and does not include the time that the timers take. `--pe` uses `pe.audit` to audit stock DDP
with `no_sync` instead of an engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _harness import hold_memory, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.audit.auditor import Auditor
from pyengine.audit.probe import Probe
from pyengine.cli.bench.models import MICRO_BATCHES, build
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

EVERY = {"none": 0, "every=1": 1, "every=100": 100}
WARM_UP = 2
CALLS = ((Auditor, "begin"), (Auditor, "sample"), (Auditor, "check"), (Auditor, "conclude"))


class _Inside:
    """Sums the time inside an audit's calls, without the time that its timers take."""

    def __init__(self) -> None:
        self._seconds, self._calls, self._depth, self._own = 0.0, 0, 0, 0.0
        nothing = self._timed(lambda *_: None)
        for _ in range(10_000):
            nothing(None)
        self._own = self.read() / 10_000
        for owner, name in CALLS:
            setattr(owner, name, self._timed(getattr(owner, name)))
        listener = Probe._listener  # noqa: SLF001 - hooks are part of the audit's cost
        Probe._listener = lambda *given: self._timed(listener(*given))  # type: ignore  # noqa: SLF001

    def read(self) -> float:
        """Return the seconds inside the audit since the last call of this method."""
        seconds = self._seconds - self._calls * self._own
        self._seconds, self._calls = 0.0, 0
        return seconds

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self._calls += 1
                self._seconds += 0.0 if self._depth else time.perf_counter() - start

        return timed


class _Engine:
    """Windows of `GradSync`."""

    def __init__(self, every: int) -> None:
        self._model, self._batches = build("gpt", torch.float32, dist.get_rank())
        self._sync = pe.GradSync(self._model, accumulate=MICRO_BATCHES)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        if every:
            self._sync.audit(every=every)

    def window(self) -> None:
        for window in self._sync.windows(self._batches):
            for x in window:
                self._sync.backward(self._model(x))
            self._sync.step(self._optimizer)


class _Stock:
    """Windows of stock DDP."""

    def __init__(self, every: int) -> None:
        self._model, self._batches = build("gpt", torch.float32, dist.get_rank())
        self._ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._watch = pe.audit(self._ddp, self._optimizer, every=every) if every else None

    def window(self) -> None:
        for index, x in enumerate(self._batches):
            with nullcontext() if index == MICRO_BATCHES - 1 else self._ddp.no_sync():
                (self._ddp(x) / MICRO_BATCHES).backward()
        if self._watch is not None:
            self._watch.reduced()
        self._optimizer.step()
        self._optimizer.zero_grad()


def cost(stock: bool, rounds: int) -> dict[str, list[float]]:
    """Return the time of every window in seconds on the slower worker, by variant."""
    torch.set_num_threads(1)
    hold_memory()
    inside = _Inside()
    loops: dict[str, Any] = {name: (_Stock if stock else _Engine)(every) for name, every in EVERY.items()}
    times: dict[str, list[float]] = {name: [] for name in (*EVERY, "inside")}
    names = list(loops)
    for done in range(rounds + WARM_UP):
        turn = done % len(names)  # so that no variant always follows the same variant
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            inside.read()
            start = time.perf_counter()
            loops[name].window()
            seconds = torch.tensor([time.perf_counter() - start, -inside.read()])  # maximum and minimum
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(seconds[0].item())
            if name == "every=1":
                times["inside"].append(-seconds[1].item())
    return times


def clean(windows: int) -> int:
    """Train a small model for `windows` windows, each of which is checked; return how many were completed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = sync.audit(every=1, module=model)
    made = torch.Generator().manual_seed(dist.get_rank())

    def batches() -> Any:
        for index in range(2 * windows):
            yield torch.randn(1 + index % 3, 8, generator=made)

    done = 0
    for window in sync.windows(batches()):
        for x in window:
            sync.backward(_loss(model(x)), count=len(x))
        sync.step(optimizer)
        done += 1
    watch.remove()
    return done


def _loss(out: Tensor) -> Tensor:
    return (out - 1).square().sum()


def report_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and return the cost of an audit."""
    times = launch(cost, workers=2, args=(options.pe, options.rounds))[0]
    kept = {name: taken[WARM_UP:] for name, taken in times.items()}
    middle = {name: statistics.median(taken) for name, taken in kept.items()}
    # Windows of the same round are compared, so that a change in the machine's load affects both of them.
    checked = statistics.median(a / b - 1 for a, b in zip(kept["every=1"], kept["none"], strict=True))
    between = statistics.median(a / b - 1 for a, b in zip(kept["every=100"], kept["none"], strict=True))
    rows = {
        "p50_ms": {name: 1e3 * value for name, value in middle.items()},
        "min_ms": {name: 1e3 * min(taken) for name, taken in kept.items()},
        "every=1 spends": middle["inside"] / middle["none"],
        "every=1 costs": checked,
        "every=100 costs between checks": between,
        "every=100 costs by its checked windows": checked / 100,
    }
    for name, value in rows.items():
        print(f"{name}: {value if isinstance(value, dict) else f'{100 * value:.3f} %'}")
    return rows


def report_clean(options: argparse.Namespace) -> dict[str, Any]:
    """Run clean windows; print and return how many raised an alarm. The first alarm ends the run."""
    start = time.perf_counter()
    done = launch(clean, workers=2, args=(options.clean,))
    rows = {"windows": min(done), "alarms": 0, "seconds": round(time.perf_counter() - start)}
    print(rows)
    return rows


def main() -> None:
    """Run the benchmark, print its results, and save them if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="windows of each variant")
    parser.add_argument("--pe", action="store_true", help="audit stock DDP with pe.audit")
    parser.add_argument("--clean", type=int, default=0, help="run this many clean windows instead")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-audit*.json")
    options = parser.parse_args()
    rows = report_clean(options) if options.clean else report_cost(options)
    if options.save:
        name = "audit-clean" if options.clean else "audit-ddp" if options.pe else "audit"
        print("wrote", save(name, {"machine": card(1), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
