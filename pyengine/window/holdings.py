"""The norm where ranks hold different elements: each counts once, and all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.ops.device import send
from pyengine.ops.plan import add_up


class Holdings:
    """Which of its gradients a rank counts, and the one all-reduce that adds up all ranks' parts.

    A gradient that several ranks hold alike (replicas) is counted by one of them; a shard by the rank that
    has it, or by one of those that have it: over all ranks every element once.
    """

    def __init__(self, counted: Sequence[bool], comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._counted = send(list(counted), torch.bool, device)

    def whole(self, sumsq: Tensor, void: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all elements of all ranks, and nan if any rank gave the window up.

        The parts of the ranks are added in the order of ranks, whatever the all-reduce does, so the bits are
        the same on every rank, and a rank that counts nothing changes none. A sum that is not counted voids,
        too.

        Cost: one all-reduce of 8 bytes a rank and 8 more, waited for.
        """
        counted = torch.where(self._counted, sumsq, 0.0)
        uncounted = torch.where(self._counted, 0.0, sumsq)
        parts = sumsq.new_zeros(self._comm.world_size + 1)
        parts[self._comm.rank] = add_up(counted)
        parts[-1] = add_up(uncounted) * 0 + void
        self._comm.all_reduce(parts).wait()
        return add_up(parts[:-1]), parts[-1]

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of all ranks' values, nan if one is. One all-reduce, waited for."""
        values = value.new_zeros(self._comm.world_size)
        values[self._comm.rank] = value
        self._comm.all_reduce(values).wait()  # a sum: what a maximum makes of nan is the backend's own affair
        return values.amax()
