"""Loops over windows: reading ahead, counts over all ranks, the end of a window, exceptions in the body."""

from __future__ import annotations

import math
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyengine.engine.between_windows import check_ranks_agree, check_same_call
from pyengine.engine.engine import Engine
from pyengine.engine.misnamed import check_function
from pyengine.ops.device import is_lazy, runs_ahead, send
from pyengine.window.counter import State, WindowCounter
from pyengine.window.denominators import ONLY, Denominators
from pyengine.window.header import Count, LocalWindow, checked_count, stacked

Batch = TypeVar("Batch")

_NEVER = -1  # means that a rank never had any batch


class Lookahead(Generic[Batch]):
    """An iterator that knows whether it has a next item, and that can return items in advance."""

    def __init__(self, items: Iterable[Batch]) -> None:
        self._items = iter(items)
        self._read: deque[Batch] = deque()
        self._is_over = False
        # The text of the exception that the last read raised; empty if it raised none.
        self._error = ""
        self._read_up_to(1)

    @property
    def has_next(self) -> bool:
        return bool(self._read)

    def pop(self) -> Batch:
        """Return the next item after reading one more item; if this read fails, no item is lost."""
        self._read_up_to(2)
        return self._read.popleft()

    def peek(self, num: int) -> list[Batch]:
        """Return the next `num` items without removing them, or fewer at the end of the data."""
        self._read_up_to(num)
        return list(self._read)[:num]

    def _read_up_to(self, num: int) -> None:
        while len(self._read) < num and not self._is_over:
            try:
                self._read.append(next(self._items))
            except StopIteration:
                self._is_over = True
                if self._error:
                    warnings.warn(
                        f"the loader has ended after raising {self._error}, as a generator does: this rank "
                        "has no further data. Leave the loop over sync.windows on every rank, or make "
                        "the loader continue after an error",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            except Exception as error:
                self._error = repr(error)
                raise
            else:
                self._error = ""


def sum_over_ranks(engine: Engine, numbers: Sequence[float]) -> list[float]:
    """Return the sums of numbers over all ranks, as float64, with the same bits on every rank.

    Ranks that share a batch contribute the batch's numbers once. Launches one all-reduce of 8 bytes per
    number, for which the host waits.
    """
    if engine.batch is not None and not engine.batch.is_counting:
        numbers = [0.0] * len(numbers)  # another rank counts this batch
    vector = send([*numbers], torch.float64, engine.device)
    engine.comm.all_reduce(vector).wait()
    return vector.tolist()


# ---- counts ----

# A function that returns the number of items in a micro-batch: a number, or a dict of numbers by loss name.
CountOf = Callable[[Any], Count | Mapping[str, Count]]

_COUNTING = "with counts read ahead (sync.windows with count=)"


class Counting:
    """Reads counts ahead for one loop over windows; for `count` see `Sync.windows`."""

    def __init__(self, engine: Engine, count: CountOf) -> None:
        example = 'lambda batch: batch["labels"].ne(-100).sum()'
        check_function(
            "count", count, f"that returns how many items a micro-batch has, for example {example}"
        )
        if is_lazy(engine.device):
            raise ValueError(
                f"count= on {engine.device}: the host would have to wait for the device and read the totals "
                "before it records a window. Pass each count to sync.backward"
            )
        self._engine, self._count = engine, count
        self._names: list[str] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """Count the items of a newly opened window, and sum the counts over all ranks.

        `batches` are the batches that this rank will process in the window; this function keeps no reference
        to them. Launches the collectives of `check_ranks_agree` and `sum_over_ranks`, and in the first window
        of a loop a gather of names.
        """
        engine = self._engine
        names, counts, problems = count_ahead(
            self._count, batches, engine.window.counts, self._names, engine.device
        )
        kind = "a window" if self._names else "a loop"
        check_ranks_agree(engine, stage=f"begins {kind} {_COUNTING}", problems=problems)
        if not self._names:
            self._names = _agree(engine, names)
        own = [math.fsum(count[name] for count in counts) for name in self._names]
        totals = dict(zip(self._names, sum_over_ranks(engine, own), strict=True))
        engine.window.denominators = Denominators(totals, counts)


def _begin_counts(engine: Engine, counting: Counting | None, source: Lookahead[Any]) -> None:
    """Count the items of the open window if the loop reads counts ahead."""
    if counting is not None:
        counting.begin(source.peek(len(engine.counter.due)))


def _agree(engine: Engine, names: list[str]) -> list[str]:
    """Return the names of the losses that all ranks count; raise ValueError if ranks differ.

    A rank without data uses the names from other ranks.
    """
    gathered: Sequence[list[str]] = engine.comm.all_gather_object(names)
    named = {rank: theirs for rank, theirs in enumerate(gathered) if theirs}
    agreed = next(iter(named.values()), [])
    if any(set(theirs) != set(agreed) for theirs in named.values()):
        listed = "; ".join(f"rank {rank} counts {theirs}" for rank, theirs in named.items())
        raise ValueError(f"count: {listed}. Let the function return the same names on every rank")
    return agreed


def count_ahead(
    count: CountOf, batches: Sequence[Any], local: LocalWindow, names: Sequence[str], device: torch.device
) -> tuple[list[str], list[dict[str, float]], list[str]]:
    """Count the items of a window's micro-batches.

    `local` determines which counts are valid; `names` is empty in the first window. Returns the names of the
    losses, the counts by micro-batch, and the problems found. Counts that are tensors are stacked on
    `device` and read together.
    """
    names = list(names)
    problems: list[str] = []
    all_given: list[dict[str, Count]] = []
    for index, batch in enumerate(batches):
        where = f"of micro-batch {index}"
        all_given.append({})
        try:
            given = count(batch)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank
            problems.append(f"count {where}: the function raised {error!r}")
            continue
        named = given if isinstance(given, Mapping) else {ONLY: given}
        names = names or list(named)
        if not named or not all(isinstance(name, str) for name in named):
            problems.append(f"count {where} has the names {list(named)}: expected one or more strings")
        elif named.keys() != set(names):
            problems.append(
                f"count {where} has {list(named)}, but {names} elsewhere: expected the same names in every "
                "micro-batch, with 0 for a name without items"
            )
        for name, value in named.items():
            try:
                all_given[-1][name] = checked_count(value)
            except (TypeError, ValueError) as error:
                problems.append(f"{_what(name)} {where}: {error}")
    tensors = [value for given in all_given for value in given.values() if isinstance(value, Tensor)]
    values = iter(stacked(tensors, device).tolist() if tensors else [])
    counts = [
        {name: next(values) if isinstance(value, Tensor) else float(value) for name, value in given.items()}
        for given in all_given
    ]
    whole = ", whole" if local.is_exact else ""
    problems += [
        f"{_what(name)} of micro-batch {index} is {value}: expected a finite{whole} number from 0 to 2**53"
        for index, read in enumerate(counts)
        for name, value in read.items()
        if not local.is_valid(value)
    ]
    return names, counts, problems


def _what(name: object) -> str:
    return "count" if name == ONLY else f"count[{name!r}]"


# ---- loops ----


class MicroBatches(Iterator[Batch]):
    """An iterator over a window's micro-batches; used as a batch, it raises an error about nested loops."""

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
    "iterate over the window: `for window in sync.windows(loader): for batch in window:`. sync.windows "
    "yields iterators of micro-batches, not batches"
)


class Windows(Iterator[MicroBatches[Batch]]):
    """The windows of one loop over a loader, returned by `Sync.windows`.

    `len` returns the number of windows for a progress bar or a scheduler: the largest number on any rank.
    """

    def __init__(self, engine: Engine, loader: Iterable[Batch], count: CountOf | None) -> None:
        self._engine, self._loader = engine, loader
        self._windows = _windows(engine, loader, count)
        self._num: int | None = None

    def __next__(self) -> MicroBatches[Batch]:
        return MicroBatches(next(self._windows), self._engine.counter)

    def __len__(self) -> int:
        """Return the largest number of windows on any rank, including a short last window.

        Every rank must call `len` at the same point; `tqdm` calls it on each rank where it wraps the
        loop. The result assumes that the length of windows does not change.

        Raises:
            TypeError: the loader of some rank has no length; raised on every rank.
            RuntimeError: some rank is at another point of its loop; raised on every rank.

        Cost: in the first call, two all-reduces of 184 and 16 bytes.
        """
        if self._num is None:
            self._num = _num_windows(self._engine, self._loader)
        return self._num

    def __bool__(self) -> bool:
        return True  # do not call `len`, which is a collective

    def close(self) -> None:
        """End the loop early, like `break`."""
        self._windows.close()


def _num_windows(engine: Engine, loader: Iterable[Any]) -> int:
    """Return the largest number of windows on any rank."""
    share, reason = len(engine.counter.share), ""
    try:
        mine = -(-len(loader) // share) if share else 0  # type: ignore[arg-type]  # may have no length
    except Exception as error:  # noqa: BLE001 - raised on every rank
        mine, reason = 0, str(error) or repr(error)
    check_same_call(engine, "calls len(sync.windows(loader)), which every rank must call")
    most, has_none = mine, int(bool(reason))
    if engine.comm.world_size > 1:
        most, has_none = engine.comm.max_of(mine, has_none)
    if has_none:
        raise TypeError(
            f"len(sync.windows(loader)): {reason or 'the loader of another rank has no length'}. Pass "
            "total= to a progress bar, or loop without a length"
        )
    return most


def _windows(
    engine: Engine, loader: Iterable[Batch], count: CountOf | None
) -> Generator[Iterator[Batch], None, None]:
    """Split a loader into windows, then yield empty windows until no rank has data left."""
    counting = None if count is None else Counting(engine, count)
    if engine.is_broken:
        engine.abandon()
    engine.is_between_loops = False
    if engine.reducer.has_collective_forwards:
        yield from _cut_padded(engine, Lookahead(loader), counting)
    else:
        yield from _cut(engine, loader, counting)
    engine.restore_rng()  # needed if no window has opened: the state is from an epoch's last window
    check_ranks_agree(engine)
    engine.is_between_loops = True


def _cut(engine: Engine, loader: Iterable[Batch], counting: Counting | None) -> Iterator[Iterator[Batch]]:
    source = Lookahead(loader)
    others = engine.comm.world_size > 1  # a rank without data must still join the collectives
    while source.has_next or others:
        engine.open()
        if source.has_next and not engine.counter.share:
            raise ValueError(_NO_SHARE)
        _begin_counts(engine, counting, source)
        yield _micro_batches(engine, source)
        engine.close_window()
        # This rank has to continue for other ranks in three cases: it dropped the window before the header
        # was sent, another rank has data left, or the loop's body has loaded a state, so that the remaining
        # data is unknown.
        others = (not source.has_next and engine.comm.world_size > 1) and (
            engine.counter.index == engine.opened_at or engine.verdicts.some_rank_has_more()
        )


@contextmanager
def single_micro_batch(engine: Engine, *, last: bool) -> Iterator[None]:
    """Run the body as one micro-batch; it ends the window if the window is full or `last` is set."""
    if engine.counter.state is not State.OPEN:
        engine.open()
    if not engine.counter.due:
        raise RuntimeError(
            f"accumulate: this rank has no micro-batch left in window {engine.counter.index}: call "
            "sync.flush() and sync.step() first"
        )
    place, *rest = engine.counter.due
    ends = last or not rest
    if engine.reducer.has_collective_forwards and (
        ends or not engine.counter.handed or engine.reducer.gathers_in_each_micro_batch
    ):
        meet_at_micro_batch(engine, last=ends)
    engine.next_micro_batch(place, last=ends, has_more=not last)
    try:
        yield
        if ends:
            engine.end_micro_batches()
    except (Exception, KeyboardInterrupt):
        with suppress(RuntimeError):  # raise the original error instead
            engine.abandon()
        raise
    except BaseException:  # the process is about to end, so do not wait for other ranks
        engine.abandon(waits=False)
        raise


def _micro_batches(engine: Engine, source: Lookahead[Batch]) -> Iterator[Batch]:
    due = engine.counter.due
    engine.window.has_more = has_next = source.has_next
    for place in due:
        if not has_next:
            break
        batch, has_next = source.pop(), source.has_next
        engine.next_micro_batch(place, last=place == due[-1] or not has_next, has_more=has_next)
        yield batch
    engine.end_micro_batches()


_NO_SHARE = (
    "loader has micro-batches on a rank that should have none, since a window has fewer micro-batches than "
    "there are ranks: pass the loader of this rank's WindowSampler, which is empty"
)


# ---- loops with collective forwards: ranks with fewer micro-batches run padding ----


def _cut_padded(
    engine: Engine, source: Lookahead[Batch], counting: Counting | None
) -> Iterator[Iterator[Batch]]:
    """Split a loader into windows that have the same number of micro-batches on every rank.

    Continues until no rank has data left. Launches two small all-reduces per window, for which the host
    waits.
    """
    rank, world_size = engine.comm.rank, engine.comm.world_size
    old: list[Batch] = []
    while True:
        engine.open()
        ahead, due = _read(engine, source), len(engine.counter.due)
        mine = min(len(ahead), due) or (0 if old else _NEVER)
        first = world_size - rank if mine > 0 else 0  # the maximum gives the first rank with data
        most, minus_fewest, first = engine.comm.max_of(mine, -mine, first)
        if most <= 0:
            engine.counter.close(completed=False)  # keep the caller's gradients in `.grad`
            return
        if -minus_fewest == _NEVER:
            old = _borrowed(engine, old, ahead, sender=world_size - first)
        _begin_counts(engine, counting, source)
        yield _handed_out(engine, source, old, mine=max(mine, 0), fewest=max(-minus_fewest, 0), most=most)
        engine.close_window()


def meet_at_micro_batch(engine: Engine, *, last: bool) -> None:
    """Raise an error on every rank unless all ranks are about to start the same micro-batch."""
    check_ranks_agree(
        engine,
        stage=f"hands out micro-batch {engine.counter.handed + 1} of a window{', its last' if last else ''}",
    )


def _read(engine: Engine, source: Lookahead[Batch]) -> list[Batch]:
    """Read one micro-batch more than the window has; check that all ranks could read their loaders.

    The additional read makes an error of the loader appear here rather than while other ranks wait in the
    forward of a sharded model.
    """
    try:
        ahead = source.peek(len(engine.counter.due) + 1)
        problems = [_NO_SHARE] if ahead and not engine.counter.share else []
    except Exception as error:
        # The other ranks wait in `check_ranks_agree` and raise an error there; this rank raises the loader's
        # error.
        try:
            check_ranks_agree(engine, stage="begins a window", problems=[f"the loader raised {error!r}"])
        except ValueError:
            raise error from None
        raise
    check_ranks_agree(engine, stage="begins a window", problems=problems)
    return ahead


def _borrowed(engine: Engine, old: list[Batch], ahead: Sequence[Batch], *, sender: int) -> list[Batch]:
    """Return `old`, or a copy of the first batch of rank `sender`; raise ValueError if it cannot be sent.

    Every rank calls this function if some rank never had data and needs a batch for its forwards.
    """
    sent: tuple[Any, str, bool] = None, "", not old
    if engine.comm.rank == sender:
        try:
            pickle.dumps(ahead[0])
            sent = ahead[0], "", False
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank
            sent = None, repr(error), False
    gathered: Sequence[tuple[Any, str, bool]] = engine.comm.all_gather_object(sent)
    batch, error_text, _ = gathered[sender]
    if error_text:
        without = ", ".join(str(rank) for rank, (*_, has_none) in enumerate(gathered) if has_none)
        raise ValueError(
            f"rank {without} has no micro-batch, and needs a copy of another rank's micro-batch, because the "
            f"forwards of a sharded model are collective; but the micro-batch of rank {sender} cannot be "
            f"pickled ({error_text}): give every rank at least one micro-batch"
        )

    def moved(tensor: Tensor) -> Tensor:
        """Copy a tensor that is on the sender's device to the same kind of device on this rank."""
        return tensor.to(engine.device) if tensor.device.type == engine.device.type else tensor

    return old or [tree_map_only(Tensor, moved, batch)]


def _handed_out(
    engine: Engine, source: Lookahead[Batch], old: list[Batch], *, mine: int, fewest: int, most: int
) -> Iterator[Batch]:
    """Yield `mine` micro-batches, then repeat the last micro-batch (in `old`), up to `most` in total.

    `fewest` and `most` are the smallest and the largest number of micro-batches on any rank.
    """
    counter, places = engine.counter, list(engine.counter.due)
    engine.window.has_more = source.has_next
    for index in range(most):
        last = index == most - 1
        if index >= fewest and counter.done < counter.handed:
            # Padding would look like an earlier micro-batch. Every rank raises this error.
            raise RuntimeError(
                f"{counter.handed} micro-batches of window {counter.index} have been handed out but only "
                f"{counter.done} backwards have run, and a rank without further data repeats its last batch: "
                "run the backward of every micro-batch before the next forward, or give every rank the same "
                "number of micro-batches"
            )
        if index and not runs_ahead(engine.device) and (last or engine.reducer.gathers_in_each_micro_batch):
            meet_at_micro_batch(engine, last=last)
        if index < mine:
            old[:] = [source.pop()]
            engine.next_micro_batch(places[index], last=last, has_more=source.has_next)
        else:
            engine.pad(last=last)
        yield old[0]
    engine.end_micro_batches()
