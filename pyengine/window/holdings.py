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
    has it, or by one of those that have it.

    Args:
        counted: by parameter, whether this rank counts what it holds of it. Over all ranks that makes every
            element once.
        comm: transport over all ranks of the engine.
        device: of the sums.
    """

    def __init__(self, counted: Sequence[bool], comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._counted = send(list(counted), torch.bool, device)

    def whole(self, sumsq: Tensor, void: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all elements of all ranks, and whether any rank gave the window up.

        Args:
            sumsq: float64 `[parameters]`, of what this rank holds, read.
            void: float 0-dim, nan if this rank gave the window up, else 0.

        Returns:
            Two float64 0-dim tensors, the same bits on every rank: the parts of the ranks are added in the
            order of ranks, whatever the all-reduce does, and a rank that counts nothing changes no bit. The
            second is nan if any rank's `void`, or any sum that is not counted, is.

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
        """Return the largest of all ranks' values, nan if one is.

        Args:
            value: float64 0-dim, of what this rank holds, counted or not; read.

        Returns:
            float64 0-dim, the same bits on every rank.

        Cost: one all-reduce of 8 bytes a rank, waited for.
        """
        values = value.new_zeros(self._comm.world_size)
        values[self._comm.rank] = value
        self._comm.all_reduce(values).wait()  # a sum: what a maximum makes of nan is the backend's own affair
        return values.amax()
