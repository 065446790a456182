"""Invalid counts and losses are an error on every rank, before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Integers, assert_alike, engine, integers, me, records_of
from ranks import on_ranks
from torch import nn

import pyengine as pe


def _engine(kind: str = "own", **options: Any) -> tuple[pe.Sync, torch.nn.Module, torch.optim.Optimizer]:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2, **options)
    return sync, forward, torch.optim.SGD(model.parameters(), lr=0.5)


def _batches() -> list[Any]:
    return [(index, *integers(index)) for index in range(4)]


def _train(sync: pe.Sync, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for window in sync.windows(_batches(), count=lambda batch: len(batch[1])):
        for _, x, t in window:
            sync.backward(forward(x, t))
        assert sync.step(optimizer)


def _refused(kind: str, count: Callable[[int, int], Any]) -> str:
    """Begin a loop whose counts are `count(rank, micro-batch)`; return the error that every rank raises."""
    rank, _ = me()
    sync, forward, optimizer = _engine(kind)
    _train(sync, forward, optimizer)
    with pytest.raises(ValueError) as caught:
        for window in sync.windows(_batches(), count=lambda batch: count(rank, batch[0])):
            for _, x, t in window:
                loss = forward(x, t)
                sync.backward(dict.fromkeys(sync.totals, loss))
            sync.step(optimizer)
    _train(sync, forward, optimizer)
    assert_alike(str(caught.value))
    return str(caught.value)


def _fail() -> None:
    raise KeyError("labels")


# The kind of engine, the count of one micro-batch, the count of the others, and the error.
WRONG: list[tuple[str, Callable[[], Any], Any, str]] = [
    ("own", lambda: -1, 3, " is -1.0: expected a finite number"),
    ("attach", lambda: {"ce": 3}, {"ce": 3, "aux": 1}, " has ['ce'], but ['ce', 'aux']"),
    ("own", _fail, 3, ": the function raised KeyError('labels')"),
    ("own-exact", lambda: 0.5, 3, " is 0.5: expected a finite, whole number"),
]


@pytest.mark.parametrize("case", range(len(WRONG)), ids=[message for *_, message in WRONG])
@on_ranks(2)
def test_what_is_no_count_on_one_rank_is_raised_on_all(case):
    kind, wrong, right, message = WRONG[case]
    # The wrong count is that of rank 1's second micro-batch in the second window.
    error = _refused(kind, lambda rank, index: wrong() if (rank, index) == (1, 3) else right)
    assert error.startswith(f"rank 1: count of micro-batch 1{message}")


@on_ranks(3)
def test_ranks_that_count_different_things_are_refused_on_every_rank():
    error = _refused("own", lambda rank, _: {"mtp": 1} if rank == 1 else {"ce": 1})
    assert "rank 0 counts ['ce']; rank 1 counts ['mtp']; rank 2 counts ['ce']" in error


def _count(batch: Any) -> dict[str, int]:
    return {"ce": len(batch[1]), "aux": 1}


BACKWARDS = {
    "sync.backward(loss)": "loss: got a single loss, but this window has counts for 'ce', 'aux'",
    "sync.backward({'ce': loss, 'aux': loss}, count=3)": "count=3: this window's counts were read ahead",
    "sync.weigh({'ce': loss})": "loss: got 'ce', but this window has counts for 'ce', 'aux'",
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
            with pytest.raises(TypeError, match=re.escape("loss: got a dict of ['ce'], but no counts")):
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
                with pytest.raises(RuntimeError, match=r"more often than micro-batches were read \(1\)"):
                    sync.backward(forward(x, t))
        assert sync.step(optimizer)


def test_what_cannot_be_counted_ahead_is_refused():
    sync, *_ = _engine()
    with pytest.raises(TypeError, match="count is a int: expected a function"):
        next(sync.windows(_batches(), count=3))


@pytest.mark.parametrize("as_tensor", [False, True])
@on_ranks(2)
def test_the_mean_over_nothing_is_no_loss(as_tensor):
    """Rank 1's first micro-batch has no labels: its mean loss is nan, its gradient and count are 0."""
    weight = nn.Parameter(torch.ones(3))
    sync = pe.GradSync([weight], accumulate=2)
    records = records_of(sync)
    for k in range(2):
        with sync.accumulate():
            nothing = (me()[0], k) == (1, 0)
            loss = 0 * weight.sum() + math.nan if nothing else weight.sum()
            count = 0 if nothing else 3
            sync.backward(loss, count=torch.tensor(count) if as_tensor else count)
    assert sync.step(torch.optim.SGD([weight], lr=0.1))
    assert records[0].loss == 1.0 and records[0].count == 9
