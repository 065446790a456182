"""Loops over windows: where they are cut, and what happens when a body raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pyengine.data.dealer import Dealer, Dealt
from pyengine.engine.ahead import Lookahead
from pyengine.engine.counting import Counting, CountOf, check_uncounted
from pyengine.engine.engine import Engine
from pyengine.engine.padded_loop import cut_padded, meet_at_micro_batch
from pyengine.window.counter import State

Batch = TypeVar("Batch")


class Window(Iterator[Batch]):
    """The micro-batches of one window; says so where it is taken for a batch."""

    def __init__(self, micro_batches: Iterator[Batch]) -> None:
        self._micro_batches = micro_batches

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
    """Cut a loader into windows, and go on with empty ones until every rank has run out;
    a dealer has cut them.
    """
    counting = None if count is None else Counting(engine, loader, count)
    if engine.window.is_broken:
        engine.window.abandon()
    engine.is_between_loops = False
    if isinstance(loader, Dealer):
        yield from _dealt(engine, loader)
    elif engine.reducer.has_collective_forwards:
        yield from cut_padded(engine, Lookahead(loader), counting)
    else:
        yield from _cut(engine, loader, counting)
    engine.window.reach_verdicts()
    engine.compare()
    engine.is_between_loops = True


def _cut(engine: Engine, loader: Iterable[Batch], counting: Counting | None) -> Iterator[Iterator[Batch]]:
    source = Lookahead(loader)
    # A rank without any data still has to meet the others, or to send what it has resumed.
    others = engine.comm.world_size > 1 or engine.counter.is_resumed
    while source.has_next or others:
        engine.open()
        if source.has_next and not (engine.counter.share or engine.counter.due):
            raise ValueError(
                "loader has micro-batches on a rank that gets none, since there are more ranks than "
                "micro-batches in a window: pass the loader of this rank's WindowSampler, which is empty"
            )
        if counting is None:
            check_uncounted(engine)
        else:
            counting.begin(source.peek(len(engine.counter.due)))
        yield _micro_batches(engine, source)
        engine.window.close()
        others = not source.has_next and engine.comm.world_size > 1 and engine.is_still_needed()


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
        engine.window.close()


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
    engine.window.hand_out(place, last=ends, more=not last)
    try:
        yield
        if ends:
            engine.window.end_hand_out()
    except (Exception, KeyboardInterrupt):
        with suppress(RuntimeError):  # what the window still owed cannot come: of that, the first error tells
            engine.window.abandon()
        raise
    except BaseException:  # the process is about to end: nobody is waited for
        engine.window.abandon(waits=False)
        raise


def _micro_batches(engine: Engine, source: Lookahead[Batch]) -> Iterator[Batch]:
    due = engine.counter.due
    engine.window.has_more_windows = source.has_next
    for place in due:
        if not source.has_next:
            break
        batch = source.pop()
        engine.window.hand_out(place, last=place == due[-1] or not source.has_next, more=source.has_next)
        yield batch
    engine.window.end_hand_out()


def _dealt_micro_batches(engine: Engine, source: Lookahead[Dealt]) -> Iterator[Dealt]:
    while source.has_next:
        place, rows = source.pop()
        engine.window.hand_out(place, last=not source.has_next, more=source.has_next)
        yield place, rows
    engine.window.end_hand_out()
