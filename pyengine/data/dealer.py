"""Dynamic assignment of micro-batches: each rank draws its next one, so slow ranks draw fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist

from pyengine.data.sampler import WindowSampler

# One micro-batch: its index in the window over all ranks, and its samples.
Dealt = tuple[int, list[int]]


class Dealer:
    """Assign a sampler's micro-batches to ranks by a shared counter, instead of in fixed shares.

    A rank draws its next micro-batch before it computes the current one, so it knows which is its last, and
    the reduction overlaps as usual. With accumulator="exact" the result, including BatchNorm's running
    statistics, has the same bits as with any other assignment. With other accumulators it is correct, but its
    last bits change from run to run.

    After an exception every rank must leave the loop and begin a new one from a checkpoint: the other ranks
    cannot draw the micro-batches that a rank has drawn.

    Args:
        sampler: defines the samples of each micro-batch and window. Its rank and world size are not used.
        store: holds the counters; None: the store of the default process group. Dealers on one store need
            different names.
        name: prefix of the counters' keys. A run that resumes after a failure has a new store.

    Cost: one addition in the store a micro-batch, about 0.1 ms on one machine.

    Example:
        >>> dealer = pe.Dealer(sampler)  # doctest: +SKIP
        >>> exact = pe.Exact(micro_batches=sampler.micro_batches)  # doctest: +SKIP
        >>> sync = pe.GradSync(model, accumulate=sampler.micro_batches, accumulator=exact)  # doctest: +SKIP
        >>> for step, window in enumerate(sync.windows(dealer)):  # doctest: +SKIP
        ...     for index, rows in window:
        ...         with pe.micro_batch_rng(seed, step=step, index=index):
        ...             sync.backward(loss_sum(model(data[rows])), count=len(rows))
        ...     sync.step(optimizer)
    """

    def __init__(self, sampler: WindowSampler, *, store: Any = None, name: str = "pyengine/deal") -> None:
        self._sampler = sampler.shard(rank=0, world_size=1)
        self._name = name
        if store is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        self._store = dist.HashStore() if store is None else store
        self._rounds = 0
        self._left = list(range(self.micro_batches))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full window, over all ranks."""
        return self._sampler.micro_batches

    def set_epoch(self, epoch: int, *, window: int = 0, done: Collection[int] = ()) -> None:
        """Set the epoch of the next iteration, and where it begins.

        A run can resume with any world size.

        Args:
            epoch: the order of the samples depends on it.
            window: first window, counted in the epoch.
            done: micro-batches of that window that are already in its sums: `sync.done` after
                `sync.load_state_dict`.
        """
        left = [place for place in range(self.micro_batches) if place not in done]
        self._sampler.set_epoch(epoch, window=window, due=left)
        self._left = left

    def __len__(self) -> int:
        """Windows left in the epoch: the same on every rank."""
        return self._sampler.num_windows - self._sampler.window

    def windows(self) -> Iterator[Iterator[Dealt]]:
        """Yield each window as an iterator over the micro-batches that this rank draws.

        Every rank iterates over all windows.
        """
        self._rounds += 1
        rows = list(self._sampler)
        left = self._left
        for number in range(len(self)):
            places, left = left, list(range(self.micro_batches))
            window, rows = rows[: len(places)], rows[len(places) :]
            yield self._draw(f"{self._name}/{self._rounds}/{number}", list(zip(places, window, strict=False)))

    def _draw(self, key: str, window: list[Dealt]) -> Iterator[Dealt]:
        while (turn := self._store.add(key, 1) - 1) < len(window):
            yield window[turn]
