"""A short training run on one rank, with a trap at every phase of a window, for every way to use the engine.

The first loop has two windows, the second three. A rank that gets an exception does what a careful user does:
it catches the exception and continues with the rest of its loader. The micro-batches of each optimizer step
are recorded independently of the engine, so that the result of a run can be recomputed (`fault_outcomes.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fault_cases import ACCUMULATE, LOOPS, Case
from fault_trap import Boom, Trap, hang_up, watched
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm import watch as comm_watch

Batch = tuple[int, Tensor, Tensor]

TURNS = ("early", "last")
assert len(TURNS) == ACCUMULATE

LEARNING_RATE = 2.0**-4
LARGE = 2.0**20  # norms stay below it, so clipping changes nothing


@dataclass
class Report:
    """How a run went on one rank.

    Attributes:
        steps: the micro-batches of this rank in each optimizer step that was taken.
        windows: `sync.window` in each of these steps.
        skipped: the reasons for steps that were not taken.
        params: the parameters at the end, in one list.
        caught: the fault's exception, as the user's code caught it.
        error: the error that ended the run; empty if the run was completed.
        warned: stall warnings of this rank's watch.
        sent: collectives that had been launched in the fault's window when it struck; -1 if it never did.
    """

    steps: list[list[int]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    params: list[float] = field(default_factory=list)
    caught: str = ""
    error: str = ""
    warned: list[str] = field(default_factory=list)
    sent: int = -1


def train(case: Case) -> Report:
    run = Run(case)
    comm_watch.WAIT_S = 0.2  # the others fail within milliseconds
    dist.barrier()  # a new process is slow up to this point
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=case.group_s))
    with warnings.catch_warnings(record=True) as caught, watched(run.trap) as works:
        warnings.simplefilter("always")
        try:
            run.loops()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the table says what is due
            run.report.error = f"{type(error).__name__}: {error}"
    if run.report.error:
        hang_up(works)
    run.report.warned = [str(warning.message) for warning in caught if "stalled" in str(warning.message)]
    run.report.sent = run.trap.sent
    run.report.params = torch.cat([p.detach().flatten() for p in run.model.parameters()]).tolist()
    return run.report


class Point(torch.autograd.Function):
    """Identity whose backward passes a trap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap, phase: str) -> Tensor:
        ctx.trap, ctx.phase = trap, phase
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.trap.in_turn(ctx.phase)
        return grad, None, None


class Integers(nn.Module):
    """Four parameters whose gradients are small integers and do not depend on the parameters.

    A backward reaches `d` first and `a` last.
    """

    def __init__(self, trap: Trap | None = None) -> None:
        super().__init__()
        for name, shape in {"a": (5, 3), "b": (3,), "c": (), "d": (131,)}.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))
        self._trap = trap
        if trap is not None:
            self.a.register_hook(lambda _: trap.in_turn("hook"))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = ((x @ self.a) * t).sum()
        if self._trap is not None:
            self._trap.in_turn("forward")
            first = Point.apply(first, self._trap, "bucket")
        terms = [first, (self.b * t).sum(), self.c * t.sum(), (self.d * x[:, :1]).sum()]
        loss = torch.stack(terms).sum()
        return loss if self._trap is None else Point.apply(loss, self._trap, "backward")


def items(rank: int) -> int:
    """Return the size of a rank's micro-batches; a full window of 1 to 3 ranks counts a power of two."""
    return 8 if rank == 2 else 4


def batch(index: int) -> Batch:
    """Return micro-batch `index`; each rank has a thousand indices."""
    generator = torch.Generator().manual_seed(index)
    size = items(index // 1000)
    x = torch.randint(-2, 3, (size, 5), generator=generator).float()
    t = torch.randint(-2, 3, (size, 3), generator=generator).float()
    return index, x, t


class Loader:
    """A rank's micro-batches of one loop. After a fault it continues where it was."""

    def __init__(self, trap: Trap, first_window: int, windows: int | None) -> None:
        self._trap, self._next = trap, first_window * ACCUMULATE
        self._end = None if windows is None else self._next + windows * ACCUMULATE

    def __iter__(self) -> Iterator[Batch]:
        self._trap.at("open", number=self._next // ACCUMULATE)
        return self

    def __next__(self) -> Batch:
        if self._next == self._end:
            raise StopIteration
        index, self._next = self._next, self._next + 1
        window, micro_batch = divmod(index, ACCUMULATE)
        # The loop reads one micro-batch ahead: it reads the next window's first one before it yields this
        # window's last one.
        self._trap.at("loader", number=window if micro_batch else -1)
        self._trap.at("loader ahead", number=-1 if micro_batch else window - 1)
        return batch(1000 * dist.get_rank() + index)


class Optimizer(torch.optim.SGD):
    """SGD that records the micro-batches of its steps, and passes traps."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.model.parameters(), lr=LEARNING_RATE)
        self._run = run
        self.register_step_pre_hook(lambda *_: run.trap.at("step"))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._run.trap.at("optimizer")
        super().step(closure)
        self._run.note_step()
        self._run.trap.at("stepped")


class Scheduler(torch.optim.lr_scheduler.ConstantLR):
    """A scheduler that keeps the learning rate, and passes a trap."""

    trap: Trap | None = None

    def step(self, epoch: Any = None) -> None:
        if self.trap is not None:
            self.trap.at("scheduler")
        super().step()


class Run:
    """One rank's run of a case: model, engine, optimizer, and the loops over windows."""

    def __init__(self, case: Case) -> None:
        self.case, self.report = case, Report()
        self.trap = Trap(case)
        self.model = Integers(self.trap)
        self.optimizer = Optimizer(self)
        self.scheduler = Scheduler(self.optimizer, factor=1.0, total_iters=1)
        self.scheduler.trap = self.trap
        self._made_of: list[int] = []
        self.sync, self.forward = self._engine()

    def loops(self) -> None:
        first = 0
        for windows in LOOPS:
            if self.sync is None:
                self._plain_loop(first, windows)
            elif self.case.has("accumulate"):
                self._accumulate_loop(self.sync, first, windows)
            else:
                self._windows_loop(self.sync, first, windows)
            first += windows

    def note_step(self) -> None:
        self.report.steps.append(list(self._made_of))
        self.report.windows.append(len(self.report.windows) if self.sync is None else self.sync.window)

    def react(self, sync: pe.Sync | None, error: BaseException) -> None:
        """Do what the case says after a fault that was caught."""
        self.report.caught = f"{type(error).__name__}: {error}"
        if self.case.fault.endswith(", abandon"):
            assert sync is not None
            sync.abandon()
        elif self.case.fault.endswith(", step again"):
            assert sync is not None
            sync.step(self.optimizer, self.scheduler)

    def _engine(self) -> tuple[pe.Sync | None, nn.Module]:
        wire = pe.wire.BF16() if self.case.has("bf16") else pe.wire.FP32()
        options: dict[str, Any] = {
            "accumulate": ACCUMULATE,
            "wire": wire,
            "stall_after_s": self.case.stall_after_s,
        }
        if self.case.has("exact"):
            options["accumulator"] = pe.Exact(micro_batches=ACCUMULATE * self.case.world)
        if self.case.has("GradSync"):
            sync = pe.GradSync(self.model, bucket_cap_mb=1e-5, **options)
            return self._listening(sync), self.model
        ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=1e-5, gradient_as_bucket_view=self.case.has("view")
        )
        if self.case.has("attach"):
            return self._listening(pe.attach(ddp, **options)), ddp
        ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
        return None, ddp

    def _listening(self, sync: pe.Sync) -> pe.Sync:
        @sync.on_step
        def listen(record: pe.StepRecord) -> None:
            if record.skipped:
                self.report.skipped.append(record.reason)
            self.trap.at("callback")

        return sync

    def _windows_loop(self, sync: pe.Sync, first: int, windows: int) -> None:
        loader = Loader(self.trap, first, windows)
        while True:
            try:
                for window in sync.windows(loader):
                    self._begin()
                    for micro_batch, item in enumerate(window):
                        self._backward(sync, TURNS[micro_batch], item)
                        if self._is_short:
                            break
                    self._step(sync)
                return
            except (Boom, KeyboardInterrupt) as error:
                self.react(sync, error)

    def _accumulate_loop(self, sync: pe.Sync, first: int, windows: int) -> None:
        loader = Loader(self.trap, first, None)
        while sync.window + sync.is_sync_step < first + windows:  # including a window that was sent
            try:
                self._begin()
                for turn in TURNS:
                    with sync.accumulate():
                        if turn == "early":
                            self.trap.at("open")
                        self._backward(sync, turn, next(loader))
                    if self._is_short:
                        break
                self._step(sync)
            except (Boom, KeyboardInterrupt) as error:
                self.react(sync, error)

    def _plain_loop(self, first: int, windows: int) -> None:
        """Train with plain DDP; only the hook is pyengine's."""
        loader = Loader(self.trap, first, None)
        end = len(self.report.steps) + windows
        while len(self.report.steps) < end:
            try:
                self._begin()
                for self.trap.turn in TURNS:
                    index, x, t = next(loader)
                    with self.forward.no_sync() if self.trap.turn == "early" else nullcontext():
                        self._made_of.append(index)
                        self.forward(x, t).backward()
                self.trap.at("clip")
                nn.utils.clip_grad_norm_(self.model.parameters(), LARGE)
                self.optimizer.step()
                self.scheduler.step()
            except (Boom, KeyboardInterrupt) as error:
                self.react(None, error)
            self.optimizer.zero_grad()

    def _begin(self) -> None:
        self.trap.next_window()
        self._made_of = []

    def _backward(self, sync: pe.Sync, turn: str, item: Batch) -> None:
        self.trap.turn = turn
        index, x, t = item
        loss = self.forward(x, t)
        self._made_of.append(index)
        sync.backward(loss, count=items(dist.get_rank()))

    @property
    def _is_short(self) -> bool:
        """Whether this is the window that every rank ends after one micro-batch."""
        return self.case.phase in ("flush", "flushed") and self.trap.number == self.case.window

    def _step(self, sync: pe.Sync) -> None:
        if self._is_short:
            self.trap.at("flush")
            sync.flush()
            self.trap.at("flushed")
        self.trap.at("clip")
        sync.clip_grad_norm_(LARGE)
        self.trap.at("clipped")
        sync.step(self.optimizer, self.scheduler)
