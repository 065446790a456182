"""Windows whose counts were read ahead: ended early, dropped, or started again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import (
    Batch,
    Integers,
    assert_alike,
    assert_same,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
    records_of,
)
from ranks import on_ranks

import pyengine as pe

Made = tuple[pe.Sync, torch.nn.Module, Integers, torch.optim.Optimizer]


def _made(kind: str = "own", accumulate: int = 3, **options: Any) -> Made:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=accumulate, **options)
    return sync, forward, model, torch.optim.SGD(model.parameters(), lr=0.0)


def _batches(num: int, first: int = 0) -> list[Batch]:
    rank, _ = me()
    return [_batch(rank, index) for index in range(first, first + num)]


def _batch(rank: int, index: int) -> Batch:
    return integers(100 * rank + index, 1 + (rank + index) % 4)


def _items(batch: Batch) -> int:
    return len(batch[0])


def _both(batch: Batch) -> dict[str, int]:
    """Count two losses: the items of the first one, and one item of the second."""
    return {"ce": len(batch[0]), "aux": 1}


# The first window on rank 0: after it has read each micro-batch, it runs these micro-batches' backwards.
TURNS = {
    "break": [[0], [1]],
    "break before the backward": [[0], []],
    "skip the last": [[0], [1], []],
    "skip the first": [[], [1], [2]],
    "two at once": [[], [0, 1], []],
}


def _ends_early(how: str, count: Any) -> str:
    """Train two windows, of which rank 0 ends the first one early; return the error message."""
    rank, world = me()
    made = sync, forward, *_ = _made()
    message = ""
    turns = [TURNS[how], *[[[0], [1], [2]]] * (world - 1)]  # by rank
    try:
        for number, window in enumerate(sync.windows(_batches(len(turns[rank]) + 3), count=count)):
            taken: list[Batch] = []
            for turn in turns[rank] if number == 0 else [[0], [1], [2]]:
                taken.append(next(window))
                for index in turn:
                    sync.backward(_losses(sync, forward, taken[index]))
            sync.flush()
            done = [[index for turn in own for index in turn] for own in turns]
            if number == 1:
                done = [[len(own) + index for index in range(3)] for own in turns]
            _use(made, done)
    except ValueError as error:
        message = str(error)
    _train(made)
    return message


def _losses(sync: pe.Sync, forward: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    loss = forward(*batch)
    return {name: loss if name in ("ce", "count") else 0 for name in sync.totals}


def _use(made: Made, done: list[list[int]]) -> None:
    """Step, after a check that the gradient is that of the micro-batches that each rank has `done`."""
    sync, _, model, optimizer = made
    batches = [_batch(rank, index) for rank, own in enumerate(done) for index in own]
    sync.unscale_()
    assert_same(grads(model), mean_of_integers(model, batches, sum(map(_items, batches))))
    assert sync.step(optimizer)


def _train(made: Made, *, first: int = 0) -> None:
    sync, forward, *_ = made
    for window in sync.windows(_batches(3, first), count=_items):
        for batch in window:
            sync.backward(forward(*batch))
        _use(made, [[*range(first, first + 3)]] * me()[1])


UNEVEN = "window ended after 2 backwards, and 3 micro-batches were handed out"


@pytest.mark.parametrize(
    ("world", "how", "count", "message"),
    [
        (1, "break", _items, ""),
        (3, "break", _items, ""),
        (2, "break before the backward", _items, ""),
        (3, "skip the last", _items, ""),
        (3, "skip the first", _items, UNEVEN),
        (3, "two at once", _items, UNEVEN),
        (3, "break", _both, "window ended after 2 backwards, and the losses were weighed by totals"),
    ],
)
def test_a_window_that_ends_early_is_divided_by_what_was_done_or_refused_on_every_rank(
    ranks, world, how, count, message
):
    errors = ranks(world).run(_ends_early, how, count)
    assert errors == errors[:1] * world
    assert f"rank 0: {message}" in errors[0] if message else errors[0] == ""


@on_ranks(2)
def test_backwards_may_come_after_all_forwards_in_any_order():
    made = sync, forward, *_ = _made("attach")
    for window in sync.windows(_batches(3), count=_items):
        losses = [forward(*batch) for batch in window]
        for loss in reversed(losses):
            sync.backward(loss)
        _use(made, [[0, 1, 2]] * me()[1])


@on_ranks(2)
def test_a_window_that_all_ranks_drop_is_counted_anew():
    sync, forward, *_ = made = _made()
    with pytest.raises(KeyError):
        for window in sync.windows(_batches(3), count=_items):
            sync.backward(forward(*next(window)))
            raise KeyError
    _train(made, first=3)


@on_ranks(3)
def test_a_window_that_one_rank_drops_is_refused_on_every_rank_and_then_counted_anew():
    """Rank 0 raises in the middle of a window, and starts it again while the other ranks end it."""
    rank, _ = me()
    made = sync, forward, _, optimizer = _made()
    messages = []
    for _ in range(2):
        try:
            for window in sync.windows(_batches(3), count=_items):
                for index, batch in enumerate(window):
                    if index == 1 and rank == 0 and not messages:
                        raise KeyError
                    sync.backward(forward(*batch))
                sync.step(optimizer)
        except (KeyError, RuntimeError) as error:
            messages.append(str(error))
    if rank == 0:  # its second attempt met the other ranks' first one
        _train(made)
        assert messages.pop(0) == ""  # its own exception
    assert_alike(messages)
    (message,) = messages
    assert "rank 0: begins a loop with counts read ahead" in message and "rank 1: sends a window" in message


@on_ranks(2)
def test_a_loader_that_fails_while_a_window_is_read_concerns_its_own_rank():
    rank, _ = me()
    made = sync, *_ = _made()

    def loader() -> Iterator[Batch]:
        yield from _batches(2)
        raise OSError("gone")

    if rank == 0:
        with pytest.raises(OSError, match="gone"):
            next(sync.windows(loader(), count=_items))
    _train(made)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_epochs_may_count_in_different_ways(kind):
    rank, world = me()
    sync, forward, _, optimizer = _made(kind)
    records = records_of(sync)
    for epoch in range(3):
        num = 4 if rank == world - 1 else 5
        for window in sync.windows(_batches(num), count=[_items, None, _both][epoch]):
            for batch in window:
                if epoch == 2:
                    sync.backward({"ce": forward(*batch), "aux": 0})
                elif epoch == 1:
                    sync.backward(forward(*batch), count=_items(batch))
                else:
                    sync.backward(forward(*batch))
            assert sync.step(optimizer)
        assert bool(sync.totals) == (epoch != 1)
    records = [(record.loss, record.collectives) for record in records]
    ahead, given, several = records[:2], records[2:4], records[4:]
    assert [loss for loss, _ in ahead] == [loss for loss, _ in given] == [loss for loss, _ in several]
    # A header and the counts are two more collectives; the first window also agrees on an order of buckets.
    assert ahead[1][1] == given[1][1] + 2 == several[1][1]


@on_ranks(2)
def test_a_window_that_a_backward_opens_has_counts_of_its_own():
    sync, forward, _, optimizer = made = _made()
    _train(made)
    (batch,) = _batches(1)
    with pytest.raises(RuntimeError, match="weigh: no counts of this window"):
        sync.weigh({"count": forward(*batch)})
    sync.set_requires_gradient_sync(True)
    sync.backward(forward(*batch), count=_items(batch))
    assert sync.step(optimizer)
    assert sync.totals == {}


@on_ranks(2)
def test_a_rank_that_begins_another_loop_is_found_by_all():
    rank, _ = me()
    sync, forward, _, optimizer = _made(accumulate=1)
    with pytest.raises(RuntimeError, match="different points") as caught:
        for _ in range(2):
            for window in sync.windows(_batches(3), count=_items):
                for batch in window:
                    sync.backward(forward(*batch))
                sync.step(optimizer)
                if rank == 0:
                    break
    first = str(caught.value)
    assert_alike(first)
    assert "rank 0: begins a loop with counts read ahead" in first
    assert "rank 1: begins a window with counts read ahead" in first


def _late(is_late: bool) -> tuple[list[float | None], list[int], str]:
    """Train two windows and end the third one early, on a host that may run ahead of its device."""
    rank, _ = me()
    sync, forward, _, optimizer = _made()
    sync._engine.is_late = is_late
    records = records_of(sync)
    known = []
    with pytest.raises(ValueError, match="were weighed by totals") as caught:
        for number, window in enumerate(sync.windows(_batches(12), count=_both)):
            known.append(len(records))
            for batch in window:
                sync.backward({"ce": forward(*batch), "aux": 0})
                if (number, rank) == (2, 0):
                    break
            sync.flush()
            sync.step(optimizer)
    return [record.loss for record in records], known, str(caught.value)


def test_a_host_that_runs_ahead_learns_of_a_window_when_the_next_one_begins(ranks):
    losses, known, message = ranks(2).run(_late, False)[0]
    assert known == [0, 1, 2]
    assert ranks(2).run(_late, True) == [(losses, [0, 1, 2], message)] * 2


@on_ranks(2)
def test_a_weighed_loss_may_have_a_backward_of_the_callers():
    _, world = me()
    sync, forward, model, optimizer = _made("attach")
    for window in sync.windows(
        _batches(3), count=lambda batch: {"ce": _items(batch), "half": 2 * _items(batch)}
    ):
        for batch in window:
            with sync.micro_batch() as mb:
                with pytest.raises(ValueError, match="mb.count: this window's counts were read ahead"):
                    mb.count = 3
                loss = forward(*batch)
                sync.weigh({"ce": loss, "half": 2 * loss}).backward()
        sync.unscale_()
        batches = 2 * [_batch(r, k) for r in range(world) for k in range(3)]
        assert_same(grads(model), mean_of_integers(model, batches, sum(map(_items, batches)) / 2))
        assert sync.step(optimizer)
