"""Micro-batches read before they are needed, and what ranks agree on before the first forward of a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch

from pyengine.engine.engine import Engine
from pyengine.engine.handshake import raise_problems
from pyengine.ops.device import send
from pyengine.window.verdict import check_agreement

Item = TypeVar("Item")


class Lookahead(Generic[Item]):
    """An iterator that knows whether it has a next item, and shows further ones before they are taken."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._read: deque[Item] = deque()
        self._read_up_to(1)

    @property
    def has_next(self) -> bool:
        """Whether there is another item; one is always read ahead."""
        return bool(self._read)

    def pop(self) -> Item:
        """Take the next item."""
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
    """Raise on every rank unless all of them begin the same window in the same way, and none complains.

    Every rank calls this where it has opened a window. A rank that has dropped this window and begins it
    anew, while others are in its middle, meets their header: all of them raise.

    Args:
        engine: with the window open.
        stage: what this rank is about to do, in words; the same on every rank.
        problems: what is wrong on this rank.

    Raises:
        ValueError: some rank has problems; names it.
        RuntimeError: ranks are at different places.

    Cost: one all-reduce of 184 bytes, for which the host waits.
    """
    engine.window.reach_verdicts()
    everybody: Sequence[Sequence[str]] = [problems]
    if engine.comm.world_size > 1:
        local = engine.window.new_counts()
        local.refusals += problems
        header = engine.window.launch_header_all_reduce(local, more=False, stage=stage)
        totals = header.totals()
        check_agreement(header, totals, engine.comm)
        everybody = engine.comm.all_gather_object(local.refusals) if totals.invalid_counts else []
    raise_problems(everybody)


def share_numbers(
    engine: Engine, *, micro_batches: int, sums: Sequence[float] = ()
) -> tuple[list[int], list[float]]:
    """Let every rank know how many micro-batches each has in the window that has been opened; after `meet`.

    Args:
        engine: with the window open.
        micro_batches: that this rank is still to compute.
        sums: n numbers of this rank, to be summed (of ranks that share a batch, one's); as many on every
        rank.

    Returns:
        The micro-batches of each rank, and the n sums over all ranks: float64, with the same bits everywhere.

    Cost: one all-reduce of 8 bytes a rank and number, for which the host waits.
    """
    by_rank = [0.0] * engine.comm.world_size
    by_rank[engine.comm.rank] = micro_batches
    if engine.batch is not None and not engine.batch.speaks:
        sums = [0.0] * len(sums)  # of a batch that another rank tells of
    vector = send([*by_rank, *sums], torch.float64, engine.device)
    engine.comm.all_reduce(vector).wait()
    numbers: list[float] = vector.tolist()
    return [int(number) for number in numbers[: len(by_rank)]], numbers[len(by_rank) :]
