"""Where one model's windows end in a loop that cannot be nested: when full, with this rank's data, with the others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from pyengine.header import Count
from pyengine.sync import Sync


class Boundary:
    """One model's windows, as a flat loop, its optimizers and its schedulers see them.

    A rank whose data has ended while others go on gets its last batch again, once a window of theirs. Its body then runs
    in an empty window: nothing counts, and clipping, steps and schedulers are those of every rank.

    Attributes:
        is_beyond: whether this rank's data has ended, and the batch is one that does not count.
        adjust_scheduler: what an AcceleratedScheduler asks of Accelerate's process-wide GradientState, as is
            `sync_gradients`.
    """

    adjust_scheduler = False

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._ended_with: Sequence[object] = ()
        self.is_beyond = False

    @property
    def is_sync_step(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self.is_beyond or self._sync.is_sync_step

    sync_gradients = is_sync_step

    @property
    def window(self) -> int:
        """Index of the window, as `pe.Sync.window`."""
        return self._sync.window

    def micro_batch(self, ended: Sequence[object]) -> AbstractContextManager[None]:
        """Wrap one micro-batch; `ended` are the loaders whose last one it is."""
        self._ended_with = ended
        return self._beyond() if self.is_beyond else self._sync.accumulate(last=bool(ended))

    def backward(self, loss: Tensor, *, count: Count) -> None:
        """Run the backward of one micro-batch, unless it does not count."""
        if not self.is_beyond:
            self._sync.backward(loss, count=count)

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Tensor:
        """Step with the window's gradients."""
        return self._sync.step(optimizer, scheduler)

    def meet(self, has_data: bool) -> None:
        """Raise on every rank if one has no batch to go on with; every rank calls this."""
        everybody = self._sync._engine.comm.all_gather_object(has_data)
        without = [rank for rank, has in enumerate(everybody) if not has]
        if without:
            raise ValueError(
                f"loader: ranks {without} have no batch at all, so their loop never begins: give every rank one (more data, "
                "smaller batches), or leave even_batches True"
            )

    def others(self, loader: object) -> Iterator[None]:
        """Go through the windows that other ranks still have, if this rank's data has ended with `loader`."""
        if not any(loader is ended for ended in self._ended_with):
            return  # read beside the windows
        engine, self._ended_with = self._sync._engine, ()
        engine.retire()
        if not engine.others_go_on():
            self._sync.synchronize()  # with the ranks whose last window of these has no body
            return
        self.is_beyond = True
        try:
            for window in self._sync.windows(()):
                yield from window  # which is empty
                yield
        finally:
            self.is_beyond = False
            engine.is_between_loops = False  # as on the other ranks

    @contextmanager
    def _beyond(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._sync.abandon()
            raise


class Together:
    """A prepared loader that goes on until every rank has come to the end of its windows; else it is that loader.

    Args:
        loader: of one of Accelerate's classes, whose way of keeping `isinstance` true this is.
        boundary: of the model whose windows end with it.
    """

    def __init__(self, loader: Any, boundary: Boundary) -> None:
        owner = loader.__dict__.setdefault("_ends_windows_of", boundary)
        if owner is not boundary:
            raise ValueError(
                "prepare: even_batches=False, and this loader ends another model's windows: in one loop ranks whose data ends "
                "at different places would meet in different orders. Prepare a loader a model and train them one after the "
                "other, or leave even_batches True"
            )
        self.loader, self._boundary = loader, boundary

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        first = list(islice(batches, 1))
        self._boundary.meet(bool(first))
        for batch in chain(first, batches):
            yield batch
        for _ in self._boundary.others(self.loader):
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property  # type: ignore[misc]  # read only
    def __class__(self) -> Any:
        return self.loader.__class__
