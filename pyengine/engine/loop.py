"""Loops over windows: where they are cut, and what happens when a body raises."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyengine.data.sampler import Dealer, Dealt
from pyengine.engine.ahead import Counting, CountOf, Lookahead, check_uncounted, meet, share_numbers
from pyengine.engine.engine import Engine
from pyengine.ops.device import runs_ahead
from pyengine.window.counter import State, WindowCounter

Batch = TypeVar("Batch")

_NEVER = -1  # instead of a number: the rank has no batch, not even an old one


class MicroBatches(Iterator[Batch]):
    """The micro-batches of one window; an error that explains it where it is used as a batch."""

    def __init__(self, micro_batches: Iterator[Batch], counter: WindowCounter) -> None:
        self._micro_batches, self._counter, self._index = micro_batches, counter, counter.index

    def __repr__(self) -> str:
        counter = self._counter
        if counter.index != self._index or counter.state is State.IDLE:
            return f"<window {self._index}, which is over>"
        return f"<window {self._index}, {counter.handed} of {counter.accumulate} micro-batches handed out>"

    def __next__(self) -> Batch:
        return next(self._micro_batches)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise TypeError(_NOT_A_BATCH)

    def __getitem__(self, _: object) -> Any:
        raise TypeError(_NOT_A_BATCH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_NOT_A_BATCH}")


_NOT_A_BATCH = (
    "iterate the window: `for window in sync.windows(loader): for batch in window:`. What sync.windows "
    "yields is an iterator of micro-batches, and no batch"
)


def windows(
    engine: Engine, loader: Iterable[Batch] | Dealer, count: CountOf | None
) -> Iterator[Iterator[Any]]:
    """Cut a loader into windows, then yield empty ones until every rank has run out of data."""
    counting = None if count is None else Counting(engine, loader, count)
    if engine.is_broken:
        engine.abandon()
    engine.is_between_loops = False
    if isinstance(loader, Dealer):
        yield from _dealt(engine, loader)
    elif engine.reducer.has_collective_forwards:
        yield from _cut_padded(engine, Lookahead(loader), counting)
    else:
        yield from _cut(engine, loader, counting)
    engine.reach_verdicts()
    engine.compare()
    engine.is_between_loops = True


def _cut(engine: Engine, loader: Iterable[Batch], counting: Counting | None) -> Iterator[Iterator[Batch]]:
    source = Lookahead(loader)
    # A rank without any data still has to meet the others, or to send what it has resumed.
    others = engine.comm.world_size > 1 or engine.counter.is_resumed
    while source.has_next or others:
        engine.open()
        if source.has_next and not (engine.counter.share or engine.counter.due):
            raise ValueError(_NO_SHARE)
        if counting is None:
            check_uncounted(engine)
        else:
            counting.begin(source.peek(len(engine.counter.due)))
        yield _micro_batches(engine, source)
        engine.close_window()
        # Other ranks need this one for a window that was dropped before it was sent, or for further ones.
        others = (not source.has_next and engine.comm.world_size > 1) and (
            engine.counter.index == engine.opened_at or engine.verdicts.some_rank_has_more()
        )


def _dealt(engine: Engine, dealer: Dealer) -> Iterator[Iterator[Dealt]]:
    if engine.shares.run > 1:
        raise TypeError(
            f"loader is a Dealer, which deals single micro-batches, and accumulator=pe.Exact(slots=...) has "
            f"slots of {engine.shares.run}, each added up on one rank: pass the loader of a WindowSampler, "
            "or leave slots out"
        )
    if engine.counter.accumulate < dealer.micro_batches:
        raise ValueError(
            f"accumulate={engine.counter.accumulate} with a Dealer of {dealer.micro_batches} micro-batches a "
            f"window: a rank may get all of them; make the engine with accumulate={dealer.micro_batches}"
        )
    if engine.batch is not None:
        raise TypeError(
            "loader is a Dealer, which gives micro-batches to whoever is free, and here ranks share batches: "
            "pass the loader of a WindowSampler, sharded along the axes that count"
        )
    if engine.reducer.has_collective_forwards:
        raise TypeError(
            "loader is a Dealer, which gives micro-batches to whoever is free, and the forwards of a sharded "
            "model are collective: pass the loader of a WindowSampler"
        )
    for window in dealer.windows():
        engine.open()
        yield _dealt_micro_batches(engine, Lookahead(window))
        engine.close_window()


@contextmanager
def single_micro_batch(engine: Engine, *, last: bool) -> Iterator[None]:
    """Make the body one micro-batch, the window's last one if it is full or `last` is set."""
    if engine.counter.state is not State.OPEN or engine.counter.is_resumed:
        engine.open()
    if not engine.counter.due:
        raise RuntimeError(
            f"accumulate: this rank has no micro-batch left in window {engine.counter.index}, which others "
            "finish: call sync.flush() and sync.step() first"
        )
    place, *rest = engine.counter.due
    ends = last or not rest
    if engine.reducer.has_collective_forwards:
        meet_at_micro_batch(engine, last=ends)
    engine.hand_out(place, last=ends, more=not last)
    try:
        yield
        if ends:
            engine.end_hand_out()
    except (Exception, KeyboardInterrupt):
        with suppress(RuntimeError):  # of missing reductions, which the first error explains
            engine.abandon()
        raise
    except BaseException:  # the process is about to end: wait for no other rank
        engine.abandon(waits=False)
        raise


def _micro_batches(engine: Engine, source: Lookahead[Batch]) -> Iterator[Batch]:
    due = engine.counter.due
    engine.has_more_windows = source.has_next
    for place in due:
        if not source.has_next:
            break
        batch = source.pop()
        engine.hand_out(place, last=place == due[-1] or not source.has_next, more=source.has_next)
        yield batch
    engine.end_hand_out()


def _dealt_micro_batches(engine: Engine, source: Lookahead[Dealt]) -> Iterator[Dealt]:
    while source.has_next:
        place, rows = source.pop()
        engine.hand_out(place, last=not source.has_next, more=source.has_next)
        yield place, rows
    engine.end_hand_out()


_NO_SHARE = (
    "loader has micro-batches on a rank that gets none, since there are more ranks than micro-batches in a "
    "window: pass the loader of this rank's WindowSampler, which is empty"
)


# ---- loops whose forwards are collective: as many micro-batches on every rank, some of them padding ----


def _cut_padded(
    engine: Engine, source: Lookahead[Batch], counting: Counting | None
) -> Iterator[Iterator[Batch]]:
    """Cut a loader into windows of as many micro-batches on every rank, until no rank has any.

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
            if handed:  # of a resumed window; no rank has anything to add
                yield _nothing(engine)
                engine.close_window()
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
        engine.close_window()


def meet_at_micro_batch(engine: Engine, *, last: bool) -> None:
    """Raise on every rank unless all of them hand out the same micro-batch; before its forward."""
    # Of a resumed window ranks may have done different numbers before: those are not counted.
    number = engine.counter.handed - engine.counter.num_resumed + 1
    meet(engine, stage=f"hands out micro-batch {number} of a window{', its last' if last else ''}")


def _read(engine: Engine, source: Lookahead[Batch]) -> list[Batch]:
    """Read this rank's part of the window, and meet the others; return it, with one more.

    One more is read, so that a loader raises here, and not while the other ranks wait in a forward.
    """
    try:
        ahead = source.peek(len(engine.counter.due) + 1)
        problems = [_NO_SHARE] if ahead and not (engine.counter.share or engine.counter.due) else []
    except Exception as error:
        # The other ranks wait in `meet`: they raise too, and this rank raises its own error.
        try:
            meet(engine, stage="begins a window", problems=[f"the loader raised {error!r}"])
        except ValueError:
            raise error from None
        raise
    meet(engine, stage="begins a window", problems=problems)
    return ahead


def _borrowed(
    engine: Engine, old: list[Batch], ahead: Sequence[Batch], by_rank: Sequence[int]
) -> list[Batch]:
    """Return `old`, or a copy of the first batch of any rank; raise ValueError if it cannot be sent.

    Every rank calls this where some rank has none to run its forwards with: its data had ended before.
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
    engine.end_hand_out()
    yield from ()


def _handed_out(
    engine: Engine, source: Lookahead[Batch], old: list[Batch], *, by_rank: Sequence[int]
) -> Iterator[Batch]:
    """Yield this rank's micro-batches, then its last one, `old`, until there are as many as on any rank."""
    places, mine, most = list(engine.counter.due), by_rank[engine.comm.rank], max(by_rank)
    engine.has_more_windows = source.has_next
    for index in range(most):
        last = index == most - 1
        if index >= min(by_rank):
            _check_order(engine)
        if not runs_ahead(engine.device) and index:
            meet_at_micro_batch(engine, last=last)
        if index < mine:
            old[:] = [source.pop()]
            engine.hand_out(places[index], last=last, more=source.has_next)
        else:
            engine.pad(last=last)
        yield old[0]
    engine.end_hand_out()


def _check_order(engine: Engine) -> None:
    """Raise, on every rank alike, where padding could not be distinguished from an earlier micro-batch."""
    counter = engine.counter
    if counter.done < counter.handed:
        raise RuntimeError(
            f"{counter.handed} micro-batches of window {counter.index} have been handed out and "
            f"{counter.done} backwards run, where a rank has run out of data and repeats its last batch: "
            "run the backward of every micro-batch before the next one's forward, or give every rank as many "
            "micro-batches"
        )
