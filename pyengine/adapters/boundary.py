"""Where one model's windows end in a loop that cannot be nested: when full, with this rank's data, with the others'."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyengine.header import Count
from pyengine.sync import Sync
from pyengine.window import State


class Boundary:
    """One model's windows, as a flat loop, its optimizers and its schedulers see them.

    A rank whose data has ended while others go on gets its last batch again, once a window of theirs; a rank without any
    gets another rank's. Its body then runs in an empty window: nothing counts, and clipping, steps and schedulers are
    those of every rank.

    Args:
        sync: the model's engine.
        is_uneven: whether ranks have different numbers of batches, and all loaders are read through `batches`.

    Attributes:
        is_uneven: as given.
        is_beyond: whether this rank's data has ended, and the batch is one that does not count.
        adjust_scheduler: what an AcceleratedScheduler asks of Accelerate's process-wide GradientState, as is
            `sync_gradients`.
    """

    adjust_scheduler = False

    def __init__(self, sync: Sync, *, is_uneven: bool) -> None:
        self._sync = sync
        self._readings: list[_Reading] = []
        # Whether the ranks have agreed that nobody made windows of the loader read last.
        self._have_parted = False
        self.is_uneven = is_uneven
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

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch, the window's last one if it is full or `last` is set."""
        if self.is_beyond:
            return self._beyond()
        if self.is_uneven:
            self._train()
        return self._sync.accumulate(last=last)

    def backward(self, loss: Tensor, *, count: Count) -> None:
        """Run the backward of one micro-batch, unless it does not count."""
        if not self.is_beyond:
            self._sync.backward(loss, count=count)

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Tensor:
        """Step with the window's gradients."""
        return self._sync.step(optimizer, scheduler)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Go through a loader and, if windows are made of it, through those that other ranks still have; all ranks do."""
        source = iter(loader)
        first = list(islice(source, 1))
        words = self._agree("begin", handed=len(first))
        reading = _Reading(is_awaited=len({word.handed for word in words}) > 1)
        self._readings.append(reading)
        self._have_parted = False
        try:
            for batch in chain(first, source):
                reading.take(batch)
                yield batch
            self._answer(reading)
            if reading.trains:
                for _ in self._others(reading):
                    yield reading.batch
        finally:
            # After a break, too, where Accelerate would go on to see the loader as running, and at its end.
            loader.end()
            self._answer(reading)
            self._readings.remove(reading)

    def _train(self) -> None:
        """Make windows of what is being read; before the first one, every rank hears whether that can go well."""
        if [reading.counts for reading in self._readings] == [True]:
            return
        if any(reading.counts for reading in self._readings):
            raise ValueError(_SEVERAL)
        if self._have_parted and not self._readings:
            raise ValueError(_AHEAD)  # a rank without any batch has gone on and does not hear of it
        batch = None
        for reading in self._readings:
            if reading.is_awaited:
                batch, reading.is_awaited = _packed(reading.batch), False
        self._agree(
            "window", handed=max((reading.handed for reading in self._readings), default=0), batch=batch
        )
        for reading in self._readings:
            reading.trains = reading.counts = True

    def _answer(self, reading: _Reading) -> None:
        """Where some ranks have no batch, they hear once from the others whether these make windows of theirs."""
        if not reading.is_awaited:
            return
        reading.is_awaited = False
        words = self._agree("end", handed=reading.handed)
        batches = [word.batch for word in words if word.batch is not None]
        reading.trains = bool(batches)
        self._have_parted = not batches
        if batches and not reading.handed:
            reading.batch = _unpacked(batches[0], self._sync._engine.device)

    def _agree(self, at: str, *, handed: int, batch: bytes | None = None) -> list[_Word]:
        """Say where this rank is and return where all are; raise on every rank if they cannot go on together."""
        mine = _Word(at, handed, len(self._readings), batch)
        words: list[_Word] = self._sync._engine.comm.all_gather_object(mine)
        begin = [rank for rank, word in enumerate(words) if word.at == "begin"]
        if 0 < len(begin) < len(words):
            raise RuntimeError(
                f"loader: ranks {begin} begin to read a prepared loader, and others are still reading one: with "
                "even_batches=False all ranks read the same loaders in the same order"
            )
        windows = [word for word in words if word.at == "window"]
        if any(word.readings > 1 for word in windows):
            raise ValueError(_SEVERAL)
        if any(word.readings == 0 for word in windows) or (windows and all(w.handed > 1 for w in windows)):
            raise ValueError(_AHEAD)
        return words

    def _others(self, reading: _Reading) -> Iterator[None]:
        """Go through the rest of the window that this rank is in, and through those that other ranks still have."""
        engine, self.is_beyond = self._sync._engine, True
        try:
            if reading.counts:
                if engine.window.state is State.OPEN:  # this rank's last batches never came to `accumulate`
                    engine.more = False
                    engine.exhaust()
                    yield
                engine.retire()
                if not engine.others_go_on():
                    self._sync.synchronize()  # with the ranks whose last window of these has no body
                    return
            for window in self._sync.windows(()):
                yield from window  # which is empty
                yield
            engine.is_between_loops = False  # as on the other ranks
        finally:
            self.is_beyond = False

    @contextmanager
    def _beyond(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._sync.abandon()
            raise


_AHEAD = (
    "accumulate: even_batches=False, and every rank has read further than the first batch that comes to accumulate, so a "
    "rank cannot tell whether its last batches were left out or are still to come: let the loop read the prepared loader "
    "itself, without a prefetcher or a list between them, and skip batches at the beginning by "
    "accelerator.skip_first_batches"
)
_SEVERAL = (
    "accumulate: even_batches=False, and more than one prepared loader is being read: their ranks would go on at different "
    "places. Make one loader of both, or read one after the other; a loader that ends no window is prepared by the "
    "Accelerator itself"
)


class _Word(NamedTuple):
    """What a rank tells the others.

    Attributes:
        at: "begin" of a reading, the first "window" of one, or the "end" of one of which no window was made.
        handed: batches handed out in it; at its beginning, whether there is one.
        readings: loaders that are being read.
        batch: for ranks that have none.
    """

    at: str
    handed: int
    readings: int
    batch: bytes | None


class _Reading:
    """One pass over a loader.

    Attributes:
        is_awaited: whether some ranks have no batch in it, and wait to hear whether the others make windows of theirs.
        handed, batch: how many batches were handed out, and the last one.
        trains: whether windows are made of it.
        counts: whether batches of this rank are in them.
    """

    def __init__(self, *, is_awaited: bool) -> None:
        self.is_awaited = is_awaited
        self.handed, self.batch = 0, None
        self.trains = self.counts = False

    def take(self, batch: Any) -> None:
        """Count a batch that is handed out."""
        self.handed, self.batch = self.handed + 1, batch


def _packed(batch: Any) -> bytes:
    packed = io.BytesIO()
    torch.save(batch, packed)
    return packed.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> Any:
    """Return a batch of another rank, on this rank's device if it was on that one's."""

    def placed(storage: Any, at: str) -> Any:
        return storage.to(device=device) if torch.device(at).type == device.type else storage

    return torch.load(io.BytesIO(packed), map_location=placed, weights_only=False)


_OWN = ("loader", "_boundary")


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
        yield from self._boundary.batches(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)  # of an object that copy or pickle has not filled yet
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    @property  # type: ignore[misc]  # read only
    def __class__(self) -> Any:
        return self.loader.__class__
