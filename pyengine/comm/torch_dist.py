"""torch.distributed as a transport: gloo, NCCL, or whatever backend the group has for the tensors' device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.traffic import Traffic


class TorchDist:
    """Collectives of one process group.

    Args:
        group: the group; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process is not a member; pass a group that contains it")
        self.traffic = Traffic()

    def all_reduce(self, flat: Tensor) -> dist.Work:
        """Start summing `flat` over all ranks, in place."""
        self.traffic.collectives += 1
        self.traffic.bytes_sent += 2 * (self.world_size - 1) * flat.nbytes // self.world_size
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank. For set-up and error reports only: it blocks and pickles."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's, one collective a dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            dist.broadcast(flat, group=self._group, group_src=0)
            for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.detach().copy_(piece.view_as(tensor))
