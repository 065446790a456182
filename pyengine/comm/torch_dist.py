"""torch.distributed as a transport: gloo, NCCL, or whatever backend the group has for the tensors' device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.base import Traffic, Work, by_dtype, ring_bytes
from pyengine.comm.roll_call import RollCall
from pyengine.comm.side_stream import SideStream
from pyengine.ops.device import as_current, runs_ahead

# Backends that the host waits for, whatever device the tensors lie on; of all others the stream waits.
_HOST_ORDERED = {"gloo", "mpi"}
# As DDP: large enough for any network, and no second copy of the model.
_PIECE_BYTES = 256 * 2**20


class _Work:
    """A collective under way, whose failure names ranks."""

    def __init__(self, work: dist.Work, roll_call: RollCall) -> None:
        self._work, self._roll_call = work, roll_call

    def wait(self) -> None:
        with self._roll_call.named():
            self._work.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class TorchDist:
    """Collectives of one process group.

    Args:
        group: the group; None is the default group.
        device: where the tensors lie.

    Attributes:
        roll_call: names the ranks that do not answer when a collective has failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process is not a member; pass a group that contains it")
        self.traffic = Traffic()
        self.roll_call = RollCall(group)
        self.is_stream_ordered = runs_ahead(device) and _backend(group, device) not in _HOST_ORDERED
        self._device = device
        self._side_stream = SideStream(device) if self.is_stream_ordered else None

    @contextmanager
    def side_stream(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the body work on a side stream where waiting is a stream's; elsewhere right here."""
        if self._side_stream is None:
            yield
        else:
            with self._side_stream.run(tensors):
                yield

    def all_reduce(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.SUM)

    def all_reduce_max(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.MAX)

    def all_gather_object(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with as_current(self._device), self.roll_call.named():  # through whose memory NCCL sends objects
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Send a quarter of a gigabyte of one dtype at a time."""
        with as_current(self._device), self.roll_call.named():
            for piece in _pieces(tensors):
                self._broadcast_(piece)

    def _broadcast_(self, piece: list[Tensor]) -> None:
        """Overwrite tensors of one dtype by one collective; a tensor alone needs no memory of ours."""
        if len(piece) == 1 and piece[0].is_contiguous():
            dist.broadcast(piece[0].detach(), group=self._group, group_src=0)
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in piece])
        dist.broadcast(flat, group=self._group, group_src=0)
        for tensor, part in zip(piece, flat.split([t.numel() for t in piece]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        self.traffic.count(ring_bytes(flat.nbytes, self.world_size))
        with self.roll_call.named():
            return _Work(dist.all_reduce(flat, op, group=self._group, async_op=True), self.roll_call)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors into lists of one dtype and at most `_PIECE_BYTES` together, or of one larger tensor."""
    for alike in by_dtype(tensors):
        piece, num_bytes = [alike[0]], alike[0].nbytes
        for tensor in alike[1:]:
            num_bytes += tensor.nbytes
            if num_bytes > _PIECE_BYTES:
                yield piece
                piece, num_bytes = [], tensor.nbytes
            piece.append(tensor)
        yield piece


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    group = dist.group.WORLD if group is None else group
    assert group is not None  # there is a default group: it has told our rank
    return group._get_backend(device).name().lower()
