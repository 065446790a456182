"""Base class of listeners to `sync.on_step`, and the numbers of a record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict

import torch.distributed as dist

from pyengine.step.step_record import StepRecord


def numbers(record: StepRecord) -> dict[str, float]:
    """Return a record's numbers by name, without missing ones; `skipped` is 0 or 1.

    Example:
        >>> record = StepRecord(0, 2, 8.0, None, 1.5, False, "", 64, 2, 0.1, 0.0, 0.2)
        >>> list(numbers(record))[:3], numbers(record)["skipped"]
        (['micro_batches', 'count', 'grad_norm'], 0.0)
    """
    fields = asdict(record)
    return {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, (int, float)) and name != "step"
    }


class Listener(ABC):
    """A callback for `sync.on_step` that writes on one rank only.

    Args:
        rank: the rank, in the default group, that writes; 0 without a group.
    """

    def __init__(self, *, rank: int) -> None:
        self.writes = rank == (dist.get_rank() if dist.is_initialized() else 0)

    def __call__(self, record: StepRecord) -> None:
        """Write one record."""
        if self.writes:
            self._write(record)

    @abstractmethod
    def _write(self, record: StepRecord) -> None: ...
