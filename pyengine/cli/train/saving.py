"""Checkpoints of `train`: every few steps, behind the last one, and behind the one in which a signal came."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pyengine.checkpoint.checkpoints import Checkpoints

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Saving:
    """One model's training in a folder; every rank makes this and calls its methods alike.

    Args:
        folder: of the checkpoints; None saves nothing, and leaves signals to what they do.
        every: steps between two saves.
        parts: what is saved and loaded, by name: objects with `state_dict` and `load_state_dict`.
        steps: of the whole training.

    Attributes:
        start: steps that the newest checkpoint had taken; 0 without one.
        stopped: the signal that ended the training; 0 if none has.
    """

    def __init__(self, folder: Path | None, *, every: int, parts: Mapping[str, Any], steps: int) -> None:
        self.start = self.stopped = 0
        self._every, self._parts, self._steps = every, parts, steps
        self._checkpoints = None if folder is None else Checkpoints(folder)
        self._came = 0
        found = self._checkpoints.load() if self._checkpoints else None
        if found is not None:
            self.start = found.step
            for name, part in parts.items():
                part.load_state_dict(found.state[name])

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Note signals in the body, for `must_stop`; one that comes behind its last step does what it did."""
        if self._checkpoints is None:
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def note(number: int, frame: FrameType | None) -> None:
            self._came = self._came or number

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._came and not self.stopped:
                signal.raise_signal(self._came)

    def must_stop(self, step: int) -> bool:
        """Save if it is time; return whether some rank has got a signal.

        Args:
            step: how many have been taken.
        """
        if self._checkpoints is None:
            return False
        came = torch.tensor(self._came)
        dist.all_reduce(came, dist.ReduceOp.MAX)  # all stop behind the same step
        self.stopped = int(came)
        if self.stopped or step % self._every == 0 or step == self._steps:
            self._checkpoints.save(step, {name: part.state_dict() for name, part in self._parts.items()})
        return bool(self.stopped)
