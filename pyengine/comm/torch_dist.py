"""torch.distributed as a transport: gloo, NCCL, or whatever backend the group has for the tensors' device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.beside import Beside
from pyengine.comm.traffic import Traffic
from pyengine.host import runs_ahead

# Backends that the host waits for, whatever device the tensors lie on; of all others the stream waits.
_HOST_ORDERED = {"gloo", "mpi"}


class TorchDist:
    """Collectives of one process group.

    Args:
        group: the group; None is the default group.
        device: where the tensors lie.

    Attributes:
        is_stream_ordered: whether waiting for a collective means that the current stream waits, not the host.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process is not a member; pass a group that contains it")
        self.traffic = Traffic()
        self.is_stream_ordered = runs_ahead(device) and _backend(group, device) not in _HOST_ORDERED
        self._beside = Beside(device) if self.is_stream_ordered else None

    @contextmanager
    def beside(self, lent: Sequence[Tensor]) -> Iterator[None]:
        """Let the body wait for collectives without stalling the running backward, where that takes another stream.

        Args:
            lent: tensors that the body uses and that may be freed before it has run.
        """
        if self._beside is None:
            yield
        else:
            with self._beside.run(lent):
                yield

    def launch(self) -> None:
        """Do nothing: the device has begun already."""

    def all_reduce(self, flat: Tensor) -> dist.Work:
        """Start summing `flat` over all ranks, in place."""
        return self._all_reduce(flat, dist.ReduceOp.SUM)

    def all_reduce_max(self, flat: Tensor) -> dist.Work:
        """Start taking the maximum of `flat` over all ranks, in place."""
        return self._all_reduce(flat, dist.ReduceOp.MAX)

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

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        self.traffic.collectives += 1
        self.traffic.bytes_sent += 2 * (self.world_size - 1) * flat.nbytes // self.world_size
        work: dist.Work = dist.all_reduce(flat, op, group=self._group, async_op=True)
        return work


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    group = dist.group.WORLD if group is None else group
    assert group is not None  # there is a default group: it has told our rank
    return group._get_backend(device).name().lower()
