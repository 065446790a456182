"""What is read, counted and agreed on before the first forward of a window."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pyengine.data.sampler import Dealer
from pyengine.engine.engine import Engine
from pyengine.engine.handshake import raise_problems
from pyengine.ops.device import is_lazy, send
from pyengine.window.denominators import ONLY, Denominators, base_of
from pyengine.window.header import Count, LocalWindow, checked_count, stacked
from pyengine.window.verdict import check_agreement

Item = TypeVar("Item")


class Lookahead(Generic[Item]):
    """An iterator that knows whether it has a next item, and shows later ones before `pop` returns them."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._read: deque[Item] = deque()
        self._read_up_to(1)

    @property
    def has_next(self) -> bool:
        return bool(self._read)

    def pop(self) -> Item:
        """Return the next item, and read another one."""
        item = self._read.popleft()
        self._read_up_to(1)
        return item

    def peek(self, num: int) -> list[Item]:
        """Return the next `num` items, fewer where the data ends; `pop` gives them again."""
        self._read_up_to(num)
        return list(self._read)[:num]

    def _read_up_to(self, num: int) -> None:
        for _ in range(num - len(self._read)):
            try:
                self._read.append(next(self._items))
            except StopIteration:
                return


def meet(engine: Engine, *, stage: str, problems: Sequence[str] = ()) -> None:
    """Raise on every rank unless all ranks begin the same window in the same way, and none has a problem.

    Every rank calls this where it has opened a window, with the same `stage`. If a rank has dropped this
    window and opens it again while the others are in its middle, its header is paired with theirs: all raise.

    Raises:
        ValueError: some rank has problems; names it.
        RuntimeError: ranks are at different places.

    Cost: one all-reduce of 184 bytes, for which the host waits.
    """
    engine.reach_verdicts()
    everybody: Sequence[Sequence[str]] = [problems]
    if engine.comm.world_size > 1:
        local = engine.new_counts()
        local.refusals += problems
        header = engine.launch_header_all_reduce(local, more=False, stage=stage)
        totals = header.totals()
        check_agreement(header, totals, engine.comm)
        everybody = engine.comm.all_gather_object(local.refusals) if totals.invalid_counts else []
    raise_problems(everybody)


def share_numbers(
    engine: Engine, *, micro_batches: int, sums: Sequence[float] = ()
) -> tuple[list[int], list[float]]:
    """Return the micro-batches that each rank has in the open window, and `sums` over all ranks.

    Of ranks that share a batch one's numbers are summed, as float64, with the same bits everywhere. After
    `meet`.

    Cost: one all-reduce of 8 bytes a rank and number, for which the host waits.
    """
    by_rank = [0.0] * engine.comm.world_size
    by_rank[engine.comm.rank] = micro_batches
    if engine.batch is not None and not engine.batch.speaks:
        sums = [0.0] * len(sums)  # of a batch for which another rank speaks
    vector = send([*by_rank, *sums], torch.float64, engine.device)
    engine.comm.all_reduce(vector).wait()
    numbers: list[float] = vector.tolist()
    return [int(number) for number in numbers[: len(by_rank)]], numbers[len(by_rank) :]


# ---- counts ----

# Returns over how many items each loss of a micro-batch is summed; a number, if there is one loss.
CountOf = Callable[[Any], Count | Mapping[str, Count]]

_COUNTING = "with counts read ahead (sync.windows with count=)"


class Counting:
    """The counts of one loop over windows; `count` as for `Sync.windows`."""

    def __init__(self, engine: Engine, loader: object, count: CountOf) -> None:
        if not callable(count):
            raise TypeError(
                f"count is a {type(count).__name__}: need a function that returns how many items a "
                'micro-batch has, for example lambda batch: batch["labels"].ne(-100).sum()'
            )
        if isinstance(loader, Dealer):
            raise TypeError(
                "count= with a Dealer: its micro-batches go to whoever is free, so no rank can read its own "
                "ahead. Deal fixed shares out by a WindowSampler, or give each count to sync.backward"
            )
        if is_lazy(engine.device):
            raise ValueError(
                f"count= on {engine.device}: the host would have to read the totals before it records a "
                "window, and wait for the device. Give each count to sync.backward"
            )
        self._engine, self._count = engine, count
        self._names: list[str] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """Count a window that has just been opened, and agree with the other ranks on its totals.

        `batches` are those that this rank is still to compute in it; they are not kept.

        Raises:
            ValueError: a count is wrong on some rank, or ranks count different things; on every rank.
            RuntimeError: as `meet`.

        Cost: as `meet` and `share_numbers`; in a loop's first window a gather of the names, too.
        """
        engine = self._engine
        local = engine.counts
        done = [float(count) for count in local.counts]
        names, counts, problems = count_ahead(self._count, batches, local, self._names, engine.device)
        drops = engine.dropping is not None
        if drops and len(names) > 1:
            problems.append(
                f"count: use nonfinite='skip' or 'raise' with counts of several losses, {names}: under "
                "nonfinite='drop_micro_batch' the losses are weighed by totals before it is known which "
                "micro-batches leave the window, and their counts with them"
            )
        kind = "a window" if self._names else "a loop"
        meet(engine, stage=f"begins {kind} {_COUNTING}", problems=problems)
        saved: dict[str, float] = {}
        if not self._names:
            self._names, saved = _agree(engine, names)
        names = self._names
        # Of what was done before a state was saved, only the divisor's count is known here.
        earlier = {base_of(saved or dict.fromkeys(names, 1.0)): math.fsum(done)}
        own = [math.fsum([earlier.get(name, 0.0), *(count[name] for count in counts)]) for name in names]
        _, sums = share_numbers(engine, micro_batches=len(batches), sums=own)
        totals = dict(zip(names, sums, strict=True))
        if saved and not drops:  # what was done before may have been dropped, and its count is 0 then
            _check_resumed(saved, totals)
        engine.denominators = Denominators(saved or totals, counts, first=len(done))


def check_uncounted(engine: Engine) -> None:
    """Raise ValueError if the open window was begun with losses that were weighed by totals."""
    resumed = engine.resumed
    if resumed is not None and len(resumed.totals) > 1:
        raise ValueError(
            f"count: the window that goes on was begun with counts of {list(resumed.totals)}: loop over "
            "sync.windows(loader, count=...) on every rank, as before"
        )


def _agree(engine: Engine, names: list[str]) -> tuple[list[str], dict[str, float]]:
    """Return the names that all ranks count, and the totals of the window if it was resumed; a rank without
    data learns them. Raise ValueError where ranks differ, or not enough is known of a resumed window.
    """
    resumed = engine.resumed
    said = names, {} if resumed is None else dict(resumed.totals), bool(engine.counts.counts)
    everybody: Sequence[tuple[list[str], dict[str, float], bool]] = engine.comm.all_gather_object(said)
    named = {rank: theirs for rank, (theirs, _, _) in enumerate(everybody) if theirs}
    agreed = next(iter(named.values()), [])
    if any(set(theirs) != set(agreed) for theirs in named.values()):
        listed = "; ".join(f"rank {rank} counts {theirs}" for rank, theirs in named.items())
        raise ValueError(f"count: {listed}. Let the function give the same names on every rank")
    saved = [theirs for _, theirs, _ in everybody if theirs]
    if not saved:
        if len(agreed) > 1 and any(has_done for *_, has_done in everybody):
            raise ValueError(
                f"count: gives {agreed}, and the window that goes on was begun without: its state has one "
                "count a micro-batch. Finish it by sync.windows(loader), and count from the next one on"
            )
        return agreed, {}
    if any(theirs != saved[0] for theirs in saved) or (agreed and set(agreed) != set(saved[0])):
        raise ValueError(
            f"count: gives {agreed}, and the states of the window that goes on have the totals {saved}: "
            "count the same things, and load states of one run"
        )
    return list(saved[0]), saved[0]


def _check_resumed(saved: Mapping[str, float], totals: Mapping[str, float]) -> None:
    """Raise on every rank if a resumed window is not the one whose totals weighed its first losses."""
    base = base_of(saved)
    if not math.isclose(saved[base], totals[base], rel_tol=1e-9):
        raise ValueError(
            f"count: the window that goes on was to count {saved[base]:.17g} of {base!r}, and counts "
            f"{totals[base]:.17g} now: let the loader go on behind the micro-batches that are done "
            "(set_epoch(..., due=sync.due)), on every rank"
        )


def count_ahead(
    count: CountOf, batches: Sequence[Any], local: LocalWindow, names: Sequence[str], device: torch.device
) -> tuple[list[str], list[dict[str, float]], list[str]]:
    """Count micro-batches behind those of `local`, which decides what is valid; `names` are empty at first.

    Returns the names of the losses, the counts by micro-batch, and problems, each with its micro-batch.
    Tensors among the counts are read at once, by way of `device`.
    """
    names, first = list(names), len(local.counts)
    problems: list[str] = []
    all_given: list[dict[str, Count]] = []
    for index, batch in enumerate(batches, start=first):
        where = f"of micro-batch {index}"
        all_given.append({})
        try:
            given = count(batch)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            problems.append(f"count {where}: the function raised {error!r}")
            continue
        named = given if isinstance(given, Mapping) else {ONLY: given}
        names = names or list(named)
        if not named or not all(isinstance(name, str) for name in named):
            problems.append(f"count {where} has the names {list(named)}: need strings, at least one")
        elif named.keys() != set(names):
            problems.append(
                f"count {where} has {list(named)}, and {names} elsewhere: need the same names in every "
                "micro-batch, with 0 for what it has nothing of"
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
        f"{_what(name)} of micro-batch {index} is {value}: need a finite{whole} number of at least 0 "
        "and at most 2**53"
        for index, read in enumerate(counts, start=first)
        for name, value in read.items()
        if not local.is_valid(value)
    ]
    return names, counts, problems


def _what(name: object) -> str:
    return "count" if name == ONLY else f"count[{name!r}]"
