"""Every owner of gradients goes through all kinds of failures; gradients that are used stay exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import Breaks, Inject, assert_same, me, raise_key_error
from ranks import on_ranks
from sharded_cases import Chain, batch, items, loss_of, right_grads, shard, whole_grads
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE = 2


class Fails(torch.optim.SGD):
    """An optimizer whose step raises while `now` is set."""

    now = False

    def step(self, closure: Any = None) -> Any:
        if self.now:
            raise KeyError("in the step")
        return super().step(closure)


class Subject:
    """An engine, and windows that check their own results.

    Args:
        kind: "own", "ddp", or how the model is sharded.
        narrow: whether parameters are bfloat16; sums are float32.
    """

    def __init__(self, kind: str, *, narrow: bool) -> None:
        self.rank, self.world = me()
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.bare = self.model = Chain(self.dtype)
        if kind == "own":
            self.sync: pe.Sync = pe.GradSync(self.model, accumulate=ACCUMULATE)
        else:
            if kind == "ddp":
                self.model = DistributedDataParallel(self.bare)
            else:
                shard(self.model, kind, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            self.sync = pe.attach(self.model, accumulate=ACCUMULATE)
        self.optimizer = Fails(self.bare.parameters(), lr=0.0)

    def train(
        self,
        numbers: Sequence[int] = (ACCUMULATE,) * 4,
        *,
        size: Callable[[int, int], int] = lambda rank, number: 3,
        until: int = ACCUMULATE,
        at: Callable[[int], Any] = lambda number: None,
        bad: bool = False,
    ) -> bool:
        """Train a window and check its gradients and record; return whether it was stepped.

        Args:
            numbers: number of micro-batches, by rank.
            size: returns the number of items of a rank's micro-batch.
            until: the loop is left after this many micro-batches.
            at: called with each micro-batch's index between forward and backward.
            bad: whether rank 0's gradient is nan.
        """
        loader = [(k, batch(100 * self.rank + k, size(self.rank, k))) for k in range(numbers[self.rank])]
        for param in self.bare.parameters():
            param.grad = None
        for window in self.sync.windows(loader):
            for k, (x, t) in window:
                loss = loss_of(self.model, (x.to(self.dtype), t))
                at(k)
                loss = Inject.apply(loss, torch.nan) if bad and self.rank == 0 else loss
                self.sync.backward(loss, count=size(self.rank, k))
                if k + 1 == until:
                    break
            if until < ACCUMULATE:
                self.sync.flush()
            self.sync.unscale_()
            members = [(r, k) for r in range(self.world) for k in range(min(numbers[r], until))]
            count = sum(size(*member) for member in members)
            if not bad:
                want = right_grads([batch(100 * r + k, size(r, k)) for r, k in members], count)
                rounded = {name: None if g is None else g.to(self.dtype) for name, g in want.items()}
                assert_same(whole_grads(self.bare), rounded)
            stepped = bool(self.sync.step(self.optimizer))
            record = self.sync.last_record
            assert (record.micro_batches, record.count) == (len(members), count)
            assert record.skipped is not stepped
            assert ("'first.weight'" in record.reason) == bad
            if until < ACCUMULATE:
                break  # the rest of the loader
        return stepped

    def one_count(self) -> None:
        assert self.train()

    def unequal_counts(self) -> None:
        assert self.train([ACCUMULATE, ACCUMULATE - 1] * 2, size=items)

    def without_data(self) -> None:
        if self.world > 1:
            assert self.train([ACCUMULATE] * (self.world - 1) + [0])

    def early_break(self) -> None:
        """Leave the loop early; the gradients up to there are used."""
        assert self.train(until=1)

    def nonfinite(self) -> None:
        assert not self.train(bad=True)
        self.one_count()

    def fails_in_forward(self) -> None:
        """Raise in the first forward of a window, and in the last one of another window."""
        for number in (1, ACCUMULATE):
            with _hooked(self.bare.second, _no_room, at=number):
                self._fails(MemoryError)
            self.one_count()

    def fails_in_backward(self) -> None:
        """Raise in the middle of a backward: the first one, and the last one of another window."""
        for number in (1, ACCUMULATE):
            with _hooked(self.bare.second, lambda *given: Breaks.apply(given[-1]), at=number):
                Breaks.now = True
                self._fails(MemoryError)
                Breaks.now = False
            self.one_count()

    def fails_between(self) -> None:
        """Raise in the loop's body between forward and backward."""
        for number in range(ACCUMULATE):
            self._fails(KeyError, at=lambda now, number=number: raise_key_error() if now == number else None)
            self.one_count()

    def fails_in_step(self) -> None:
        self.optimizer.now = True
        self._fails(KeyError)
        self.optimizer.now = False
        self.one_count()

    def _fails(self, error: type[Exception], **options: Any) -> None:
        with pytest.raises(error):
            self.train(**options)
        self.sync.abandon()


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any], *, at: int) -> Iterator[None]:
    """Run a hook after the module's forward number `at`."""
    calls: list[int] = []

    def run(*given: Any) -> Any:
        calls.append(1)
        return hook(*given) if len(calls) == at else None

    handle = module.register_forward_hook(run)
    try:
        yield
    finally:
        handle.remove()


def _no_room(*_: object) -> None:
    raise MemoryError("no room")


STAGES = (  # each leaves a working engine: the next window, in the same or the next stage, is right
    Subject.unequal_counts,
    Subject.without_data,
    Subject.early_break,
    Subject.nonfinite,
    Subject.fails_in_forward,
    Subject.fails_in_backward,
    Subject.fails_between,
    Subject.fails_in_step,
)


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "world"), [("own", 3), ("ddp", 3), ("nested", 2), ("hsdp", 4), ("replicate", 2), ("nested", 1)]
)
@on_ranks()
def test_windows_come_out_right_or_not_at_all(kind, narrow):
    subject = Subject(kind, narrow=narrow)
    subject.one_count()
    for stage in STAGES:
        try:
            stage(subject)
        except Exception as error:
            raise AssertionError(stage.__name__) from error
