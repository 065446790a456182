"""The transport of a single process: nothing moves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyengine.comm.base import Comm, Done, Hosts, Levels


class Local(Comm):
    """One rank, no collectives."""

    can_exchange = True

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def levels(self, hosts: Hosts | None = None) -> Levels:
        """Return two levels of one rank."""
        del hosts
        return Levels(self, self, 1)

    def between_hosts(self) -> Local:
        """Return this transport: there is one host."""
        return self

    def all_reduce(self, flat: Tensor) -> Done:
        """Return at once: the sum over one rank is already there."""
        return Done(flat)

    def all_reduce_max(self, flat: Tensor) -> Done:
        """Return at once: the maximum over one rank is already there."""
        return Done(flat)

    def all_to_all(self, received: Tensor, parts: Tensor) -> Done:
        """Copy the one part."""
        return Done(received.copy_(parts))

    def all_gather(self, gathered: Tensor, part: Tensor) -> Done:
        """Copy the one part."""
        return Done(gathered.copy_(part))

    def all_gather_object(self, value: object) -> list[Any]:
        return [value]

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Do nothing: rank 0 is the only rank."""
