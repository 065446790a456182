"""Counts and losses that make no sense are told on every rank, and nothing has run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Integers, engine, integers, me

import pyengine as pe


def _engine(kind: str = "own", **options: Any) -> tuple[pe.Sync, torch.nn.Module, torch.optim.Optimizer]:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2, **options)
    return sync, forward, torch.optim.SGD(model.parameters(), lr=0.5)


def _batches() -> list[Any]:
    return [(index, *integers(index)) for index in range(4)]


def _train(sync: pe.Sync, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train a loop, to show that an engine works."""
    for window in sync.windows(_batches(), count=lambda batch: len(batch[1])):
        for _, x, t in window:
            sync.backward(forward(x, t))
        assert sync.step(optimizer)


def _refused(kind: str, give: Callable[[int, int], Any]) -> str:
    """Begin a loop whose function gives `give(rank, micro-batch)`; return what it raises."""
    rank, _ = me()
    sync, forward, optimizer = _engine(kind)
    _train(sync, forward, optimizer)
    with pytest.raises(ValueError) as caught:
        for window in sync.windows(_batches(), count=lambda batch: give(rank, batch[0])):
            for _, x, t in window:
                loss = forward(x, t)
                sync.backward(dict.fromkeys(sync.totals, loss))
            sync.step(optimizer)
    _train(sync, forward, optimizer)
    return str(caught.value)


def _on(wrong: Any, right: Any, rank: int, micro_batch: int) -> Any:
    """Return the wrong value on rank 1 in micro-batch 3, the second of the second window."""
    return wrong if (rank, micro_batch) == (1, 3) else right


class Give:
    """Gives a wrong value in one place, as a function that can be sent to other processes."""

    def __init__(self, wrong: Any, right: Any = 3) -> None:
        self.wrong, self.right = wrong, right

    def __call__(self, rank: int, micro_batch: int) -> Any:
        return _on(self.wrong, self.right, rank, micro_batch)


class Fail(Give):
    """Raises there."""

    def __call__(self, rank: int, micro_batch: int) -> Any:
        if _on(True, False, rank, micro_batch):
            raise KeyError("labels")
        return 3


WRONG = [
    ("own", Give(-1), "count of micro-batch 1 is -1.0: need a finite number"),
    ("attach", Give({"ce": 3}, {"ce": 3, "aux": 1}), "count of micro-batch 1 has ['ce'], and ['ce', 'aux']"),
    ("own", Fail(3), "count of micro-batch 1: the function raised KeyError('labels')"),
    ("own-exact", Give(0.5), "count of micro-batch 1 is 0.5: need a finite, whole number"),
]


@pytest.mark.parametrize(("kind", "give", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_is_no_count_on_one_rank_is_raised_on_all(ranks, kind, give, message):
    first, *others = ranks(2).run(_refused, kind, give)
    assert others == [first]
    assert first.startswith(f"rank 1: {message}")


class NamesOf(Give):
    """Gives other names on rank 1."""

    def __call__(self, rank: int, micro_batch: int) -> Any:
        return {"mtp": 1} if rank == 1 else {"ce": 1}


def test_ranks_that_count_different_things_are_refused_on_every_rank(ranks):
    first, *others = ranks(3).run(_refused, "own", NamesOf(0))
    assert all(other == first for other in others)
    assert "rank 0 counts ['ce']; rank 1 counts ['mtp']; rank 2 counts ['ce']" in first


def _count(batch: Any) -> dict[str, int]:
    return {"ce": len(batch[1]), "aux": 1}


BACKWARDS = {
    "sync.backward(loss)": "loss: got one, and this window counts 'ce', 'aux'",
    "sync.backward({'ce': loss, 'aux': loss}, count=3)": "count=3: this window's counts were read ahead",
    "sync.backward({'ce': loss, 'aux': 2})": "loss['aux']: got 2, need a 0-dim tensor",
    "sync.backward({'ce': loss.detach(), 'aux': 0})": "loss: requires no gradient",
    "sync.weigh({'ce': loss})": "loss: got 'ce', and this window counts 'ce', 'aux'",
}


@pytest.mark.parametrize(("losses", "message"), BACKWARDS.items())
def test_losses_that_are_not_those_counted_are_refused_before_anything_runs(losses, message):
    sync, forward, optimizer = _engine()
    for window in sync.windows(_batches(), count=_count):
        for index, x, t in window:
            loss = forward(x, t)
            if index == 2:
                with pytest.raises((ValueError, RuntimeError, TypeError), match=re.escape(message)):
                    eval(losses, {"sync": sync, "loss": loss})
            sync.backward({"ce": loss, "aux": loss})
        assert sync.step(optimizer)


def test_a_window_without_counts_takes_one_loss():
    sync, forward, optimizer = _engine()
    for window in sync.windows(_batches()):
        for _, x, t in window:
            loss = forward(x, t)
            assert sync.totals == {}
            with pytest.raises(TypeError, match=re.escape("loss: got a dict of ['ce'], and no counts")):
                sync.backward({"ce": loss})
            with pytest.raises(RuntimeError, match="weigh: no counts of this window were read ahead"):
                sync.weigh({"ce": loss})
            sync.backward(loss)
        sync.step(optimizer)


def test_a_second_backward_for_a_micro_batch_is_refused():
    sync, forward, optimizer = _engine()
    for window in sync.windows(_batches(), count=lambda batch: len(batch[1])):
        for index, x, t in window:
            sync.backward(forward(x, t))
            if index == 0:
                with pytest.raises(RuntimeError, match="backward after the backwards of all 1 micro-batches"):
                    sync.backward(forward(x, t))
        assert sync.step(optimizer)


def test_what_cannot_be_counted_ahead_is_refused():
    sync, *_ = _engine()
    with pytest.raises(TypeError, match="count is a int: need a function"):
        next(sync.windows(_batches(), count=3))
    dealer = pe.Dealer(pe.WindowSampler(8, global_batch=4, micro_batch=2, seed=0))
    with pytest.raises(TypeError, match="count= with a Dealer"):
        next(sync.windows(dealer, count=len))
