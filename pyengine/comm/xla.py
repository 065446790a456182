"""A transport over torch_xla: collectives are recorded, and then run as part of the recorded program.

This module is written for torch_xla 2.9. Ranks are not read from `torch.distributed`, which returns the same
rank for all replicas that are threads of one process.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from pyengine.comm.base import Comm, Work, by_dtype, ring_bytes
from pyengine.ops.device import HOST

_log = logging.getLogger("pyengine.comm")

_LIMB_BITS = 16


class _Queued(Work):
    """A collective recorded in a program.

    It has no future. Its result is available once the program has run.
    """

    def __init__(self, comm: Xla) -> None:
        self._comm = comm

    def wait(self) -> None:
        self._comm.record()


class Xla(Comm):
    """A transport over all replicas.

    Reductions are queued, and the first wait records all queued reductions, as one operation per dtype.
    Therefore a header that is known before the window's last backward adds no collective to the program of
    this backward.

    Under SPMD there is only one replica, whose partitioned programs already contain the reductions.
    """

    is_stream_ordered = True

    def __init__(self, device: torch.device) -> None:
        is_spmd = xr.is_spmd()
        super().__init__(
            rank=0 if is_spmd else xr.global_ordinal(), world_size=1 if is_spmd else xr.world_size()
        )
        self._device = device
        self._queue: list[Tensor] = []
        # The index of this replica must be data, because a constant would give each replica a different
        # program.
        ranks = torch.arange(self.world_size, dtype=torch.int64, device=HOST)
        self._is_mine = (ranks == self.rank)[:, None, None].to(device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._is_root = torch.tensor([self.rank == 0], dtype=torch.bool, device=HOST).to(device)
        torch_xla.sync()

    def unsupported_reason(self, dtype: torch.dtype) -> str:
        if dtype == torch.bfloat16 and self.world_size > 1 and xr.device_type() == "CPU":
            return "XLA's CPU backend has no all-reduce of bfloat16"
        return ""

    def all_reduce(self, flat: Tensor) -> _Queued:
        """Queue the sum of `flat` over all replicas, in place; float64 values must be in float32's range."""
        self._queue.append(flat)
        return _Queued(self)

    def all_reduce_max(self, flat: Tensor) -> _Queued:
        """Raise RuntimeError: only exact sums need a maximum, and XLA does not support exact sums."""
        raise RuntimeError("all_reduce_max: accumulator='exact' is not supported on XLA devices")

    @torch.no_grad()
    def record(self) -> None:
        queue, self._queue = self._queue, []
        _log.debug("record %d all-reduces", len(queue))
        # Always use new tensors, because torch_xla 2.9 may lose the in-place reduction of a tensor: the
        # reduction is lost if the tensor was modified in place before (for example by gradient accumulation),
        # and an alias of the tensor is modified later (for example by clipping).
        fresh = [self._scatter(flat) if flat.dtype == torch.float64 else flat.clone() for flat in queue]
        self._sum_(fresh)
        for flat, total in zip(queue, fresh, strict=True):
            if flat.dtype == torch.float64:
                total = _joined(total.double().unbind(1), flat.dtype).sum(0)
            flat.copy_(total)

    def all_gather_object(self, value: object) -> list[Any]:
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(mine)], dtype=torch.int32, device=HOST)).tolist()
        # A program is compiled for each length, so lengths are rounded up to let pickles of similar lengths
        # share a program.
        length = max(1024, 1 << (max(sizes) - 1).bit_length())
        padded = torch.zeros(length, dtype=torch.uint8, device=HOST)
        padded[: len(mine)] = mine
        rows = self._gather(padded).view(self.world_size, -1)
        return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]  # noqa: S301 - SECURITY.md

    @torch.no_grad()
    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's values; -0 becomes +0.

        Values are sent in float32, because all backends can sum this dtype.
        """
        if self.world_size == 1:
            return
        pieces = [_pieces(tensor.detach()) for tensor in tensors]
        fresh = [torch.where(self._is_root[0], p, torch.zeros_like(p)) for group in pieces for p in group]
        self._sum_(fresh)
        received = iter(fresh)
        for tensor, group in zip(tensors, pieces, strict=True):
            tensor.detach().copy_(_joined([next(received) for _ in group], tensor.dtype))
        torch_xla.sync()

    def _sum_(self, tensors: list[Tensor]) -> None:
        for group in by_dtype(tensors):
            self.traffic.count(ring_bytes(sum(tensor.nbytes for tensor in group), self.world_size))
            # Layouts are not pinned, because pinned layouts would have to match the layouts of all-gathers in
            # the program.
            xm.all_reduce(xm.REDUCE_SUM, group, pin_layout=False)

    def _scatter(self, vector: Tensor) -> Tensor:
        """Split a float64 vector into float32 pieces, in this replica's row of a larger tensor.

        The result has the shape `[replicas, pieces, n]`, and its other rows are 0. XLA does not reduce 64-bit
        dtypes on TPUs, and one row per replica allows a sum in rank order.
        """
        pieces = torch.stack(_pieces(vector))
        return torch.where(self._is_mine, pieces, self._zero)

    def _gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all replicas on the host: run a program and wait for its result."""
        self.traffic.count((self.world_size - 1) * tensor.nbytes)
        gathered: Tensor = xm.all_gather(tensor.to(self._device), pin_layout=False)
        torch_xla.sync()
        return gathered.cpu()


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Split a tensor into float32 tensors of the same shape, which together contain all of its bits.

    float64 values must be in the range of float32.
    """
    if tensor.dtype == torch.float64:
        first = tensor.float()
        # For inf, nan and values outside the range of float32, the remainder is 0.
        rest = torch.nan_to_num(tensor - first.double(), nan=0.0, posinf=0.0, neginf=0.0)
        second = rest.float()
        return [first, second, (rest - second.double()).float()]
    if tensor.dtype in (torch.int32, torch.int64):
        # Mask before shifting, because torch_xla implements right shifts by division, which rounds negative
        # numbers toward 0. The last limb is signed.
        *shifts, last = range(0, 8 * tensor.dtype.itemsize, _LIMB_BITS)
        limbs = [(tensor & (2**_LIMB_BITS - 1 << shift)) >> shift for shift in shifts]
        return [limb.float() for limb in (*limbs, (tensor & -(2**last)) >> last)]
    return [tensor.float()]


def _joined(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        first, second, third = (piece.double() for piece in pieces)
        return first + (second + third)
    if dtype in (torch.int32, torch.int64):
        limbs = [piece.to(torch.int64) << (_LIMB_BITS * index) for index, piece in enumerate(pieces)]
        return torch.stack(limbs).sum(0).to(dtype)
    return pieces[0].to(dtype)
