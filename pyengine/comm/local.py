"""The transport of a single process: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Traffic
from pyengine.comm.levels import Hosts, Levels


class _Done:
    def __init__(self, value: Tensor) -> None:
        self._value = value

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._value])
        return future


class Local:
    """One rank, no collectives."""

    world_size = 1
    rank = 0
    is_stream_ordered = False

    def __init__(self) -> None:
        self.traffic = Traffic()

    def join(self, other: Comm) -> None:
        """Let what is counted here belong to another transport's engine."""
        self.traffic = other.traffic

    def levels(self, hosts: Hosts | None = None) -> Levels:
        """Return two levels of one rank."""
        del hosts
        return Levels(self, self, 1)

    def between_hosts(self) -> Local:
        """Return itself: there is one host."""
        return self

    def release(self) -> None:
        """Do nothing."""

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Work right here: there is nobody to wait for."""
        del tensors
        return nullcontext()

    def all_reduce(self, flat: Tensor) -> _Done:
        """Return at once: the sum over one rank is already there."""
        return _Done(flat)

    def all_reduce_max(self, flat: Tensor) -> _Done:
        """Return at once: the maximum over one rank is already there."""
        return _Done(flat)

    def all_to_all(self, received: Tensor, parts: Tensor) -> _Done:
        """Copy the one part."""
        return _Done(received.copy_(parts))

    def all_gather(self, gathered: Tensor, part: Tensor) -> _Done:
        """Copy the one part."""
        return _Done(gathered.copy_(part))

    def all_gather_object(self, value: object) -> list[Any]:
        return [value]

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Do nothing: rank 0 is the only rank."""
