"""Checkpoints of `train`: every few steps, after the last step, and after the step of a signal."""

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
    """The checkpoints of one model's training; every rank calls the same methods in the same order.

    Args:
        folder: of the checkpoints; None saves nothing and handles no signals.
        every: steps between two checkpoints.
        parts: the objects to save and to load, with `state_dict` and `load_state_dict`, by name.
        steps: of the whole training.

    Attributes:
        start: the step of the newest checkpoint, from which training continues; 0 without one.
        stopped: the signal that has ended the training; 0 for none.
    """

    def __init__(self, folder: Path | None, *, every: int, parts: Mapping[str, Any], steps: int) -> None:
        self.start = self.stopped = 0
        self._every, self._parts, self._steps = every, parts, steps
        self._checkpoints = None if folder is None else Checkpoints(folder)
        self._signal = 0
        found = self._checkpoints.load() if self._checkpoints else None
        if found is not None:
            self.start = found.step
            for name, part in parts.items():
                part.load_state_dict(found.state[name])

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Defer signals in the body to `must_stop`; raise one that arrives after the last step again."""
        if self._checkpoints is None:
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = self._signal or number

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._signal and not self.stopped:
                signal.raise_signal(self._signal)

    def must_stop(self, step: int) -> bool:
        """Save a checkpoint if one is due; return whether a rank has received a signal.

        Args:
            step: the number of steps so far.
        """
        if self._checkpoints is None:
            return False
        received = torch.tensor(self._signal)
        dist.all_reduce(received, dist.ReduceOp.MAX)  # all ranks stop after the same step
        self.stopped = int(received)
        if self.stopped or step % self._every == 0 or step == self._steps:
            self._checkpoints.save(step, {name: part.state_dict() for name, part in self._parts.items()})
        return bool(self.stopped)
