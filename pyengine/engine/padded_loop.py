"""Loops over windows whose forwards are collective: every rank runs as many micro-batches, some of them
padding.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyengine.engine.ahead import Lookahead, meet, share_numbers
from pyengine.engine.counting import Counting, check_uncounted
from pyengine.engine.engine import Engine
from pyengine.ops.device import runs_ahead

Batch = TypeVar("Batch")

_NEVER = -1  # what a rank says that has no batch, not even an old one


def cut_padded(
    engine: Engine, source: Lookahead[Batch], counting: Counting | None
) -> Iterator[Iterator[Batch]]:
    """Cut a loader into windows of as many micro-batches on every rank, until no rank has any.

    Args:
        engine: over a reducer that `has_collective_forwards`.
        source: the micro-batches of this rank; as many are read ahead as a window takes.
        counting: the counts of the loop; None if they come with the backwards.

    Raises:
        ValueError: a rank has no batch to pad with and another one's cannot be pickled, or a loader raised;
            on every rank.
        RuntimeError: ranks are at different places.

    Cost: two small all-reduces a window, for which the host waits.
    """
    old: list[Batch] = []
    while True:
        engine.open()
        ahead, due = _read(engine, source), len(engine.counter.due)
        old = old or ahead[:1]  # of a resumed window this rank may have done its share
        mine = min(len(ahead), due) or (0 if old else _NEVER)
        by_rank, (handed,) = share_numbers(engine, micro_batches=mine, sums=[engine.counter.handed])
        if max(by_rank) <= 0:
            if handed:  # of a resumed window; nobody has anything to add
                yield _nothing(engine)
                engine.window.close()
                continue
            engine.counter.close(completed=False)  # what the caller has left in `.grad` stays
            return
        if _NEVER in by_rank:
            old = _borrowed(engine, old, ahead, by_rank)
        if counting is None:
            check_uncounted(engine)
        else:
            counting.begin(source.peek(len(engine.counter.due)))
        yield _handed_out(engine, source, old, by_rank=[max(number, 0) for number in by_rank])
        engine.window.close()


def meet_at_micro_batch(engine: Engine, *, last: bool) -> None:
    """Raise on every rank unless all of them hand out the same micro-batch; before its forward.

    Of a resumed window, those that were done before are not counted: ranks may have done different numbers.

    Cost: one all-reduce of 184 bytes, for which the host waits.

    Raises:
        RuntimeError: ranks are at different places.
    """
    number = engine.counter.handed - engine.counter.num_resumed + 1
    meet(engine, stage=f"hands out micro-batch {number} of a window{', its last' if last else ''}")


def _read(engine: Engine, source: Lookahead[Batch]) -> list[Batch]:
    """Read this rank's part of the window, and meet the others; return it, with one more.

    One more is read, so that a loader raises here, and not while the others wait in a forward.
    """
    try:
        ahead = source.peek(len(engine.counter.due) + 1)
        problems = [_NO_SHARE] if ahead and not (engine.counter.share or engine.counter.due) else []
    except Exception as error:
        # The others wait: they learn of it, and this rank raises its own.
        try:
            meet(engine, stage="begins a window", problems=[f"the loader raised {error!r}"])
        except ValueError:
            raise error from None
        raise
    meet(engine, stage="begins a window", problems=problems)
    return ahead


_NO_SHARE = (
    "loader has micro-batches on a rank that gets none, since there are more ranks than micro-batches in a "
    "window: pass the loader of this rank's WindowSampler, which is empty"
)


def _borrowed(
    engine: Engine, old: list[Batch], ahead: Sequence[Batch], by_rank: Sequence[int]
) -> list[Batch]:
    """Return `old`, or a batch of the first rank that has one; every rank calls this where some rank has none
    to run its forwards with: its data had ended before the loop began.

    Raises:
        ValueError: the batch cannot be sent; on every rank.

    Cost: a gather of that batch.
    """
    sender = next(rank for rank, number in enumerate(by_rank) if number > 0)
    sent: tuple[Any, str] = None, ""
    if engine.comm.rank == sender:
        try:
            pickle.dumps(ahead[0])
            sent = ahead[0], ""
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            without = ", ".join(str(rank) for rank, number in enumerate(by_rank) if number == _NEVER)
            sent = (
                None,
                (
                    f"rank {without} has no micro-batch at all, and needs a copy of another one's, since the "
                    f"forwards of a sharded model are collective; that of rank {sender} cannot be pickled "
                    f"({error!r}): give every rank at least one"
                ),
            )
    batch, problem = engine.comm.all_gather_object(sent)[sender]
    if problem:
        raise ValueError(problem)
    return old or [_on(engine.device, batch)]


def _on(device: torch.device, value: Any) -> Any:
    """Return a batch whose tensors are on this rank's device, if they were on another one of its kind."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == device.type else value
    if isinstance(value, dict):
        return {name: _on(device, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(device, item) for item in value)
    return value


def _nothing(engine: Engine) -> Iterator[Any]:
    engine.window.end_hand_out()
    yield from ()


def _handed_out(
    engine: Engine, source: Lookahead[Batch], old: list[Batch], *, by_rank: Sequence[int]
) -> Iterator[Batch]:
    """Give out this rank's micro-batches, then its last one again, until the window has as many as on any
    rank; `old` holds that one.
    """
    places, mine, most = list(engine.counter.due), by_rank[engine.comm.rank], max(by_rank)
    engine.window.has_more_windows = source.has_next
    for index in range(most):
        last = index == most - 1
        if index >= min(by_rank):
            _check_order(engine)
        if not runs_ahead(engine.device) and index:
            meet_at_micro_batch(engine, last=last)
        if index < mine:
            old[:] = [source.pop()]
            engine.window.hand_out(places[index], last=last, more=source.has_next)
        else:
            engine.window.pad(last=last)
        yield old[0]
    engine.window.end_hand_out()


def _check_order(engine: Engine) -> None:
    """Raise, on every rank alike, where a padding micro-batch on some rank could not be told from an earlier
    one.
    """
    counter = engine.counter
    if counter.done < counter.handed:
        raise RuntimeError(
            f"{counter.handed} micro-batches of window {counter.index} have been handed out and "
            f"{counter.done} backwards run, where a rank has run out of data and repeats its last batch: "
            "run the backward of every micro-batch before the next one's forward, or give every rank as many "
            "micro-batches"
        )
