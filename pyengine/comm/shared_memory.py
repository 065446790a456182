"""Shared memory as a transport: the ranks of one host reduce in place, in memory that all of them see."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.arena import Arena, Offer
from pyengine.comm.base import Comm, Work, ring_bytes
from pyengine.comm.torch_dist import TorchDist
from pyengine.ops.device import runs_ahead


class SharedMemory(TorchDist):
    """Collectives of one process group whose ranks are processes of one host, on tensors on the CPU.

    Reductions run in an arena: every rank adds its share of all buffers up, in the order of ranks, and writes
    it into all of them. Narrow types are added in float32 and rounded once. All other collectives, and types
    that the arena has not, are the process group's.

    Args:
        group: the group; None is the default group.
        device: where the tensors lie.
        arena: of the group's ranks; ended by `release`, behind which the group reduces.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, arena: Arena) -> None:
        super().__init__(group, device)
        self._arena: Arena | None = arena

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype) if self._arena is None else self._arena.allocate(numel, dtype)

    def release(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        super().release()

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        is_max = op == dist.ReduceOp.MAX
        if self._arena is None or not self._arena.takes(flat, is_max=is_max):
            return super()._all_reduce(flat, op)
        self.traffic.count(ring_bytes(flat.nbytes, self.world_size))
        with self.roll_call.named():
            work: Any = self._arena.reduce(flat, is_max=is_max, timeout_s=self._timeout_s())
        return self._launched(work, f"an all-reduce of {flat.nbytes} bytes")

    def _timeout_s(self) -> float:
        """Return after how many seconds the group gives a collective up."""
        group = dist.group.WORLD if self._group is None else self._group
        assert group is not None  # there is a default group: it has told our rank
        limit: timedelta = group._get_backend(self._device).options._timeout
        return limit.total_seconds()


def problems_of_sharing(device: torch.device) -> list[str]:
    """Say why ranks cannot share the memory of a device."""
    if not runs_ahead(device):
        return []
    return [
        (
            f"shared_memory=True, and parameters lie on {device}: ranks share memory of the host, so need "
            "parameters on the CPU; leave it out"
        )
    ]


def share_memory(comm: Comm) -> Comm:
    """Return a transport over the same ranks that reduces in shared memory; one rank has nothing to share.

    Where ranks are of several hosts, or the host refuses on any of them, all go on by `comm`, and rank 0
    warns and says why.

    Args:
        comm: transport, of tensors on the CPU; every rank of it calls this, and its end is the end of what is
            returned.

    Cost: two gathers of objects.
    """
    if not isinstance(comm, TorchDist) or comm.world_size == 1:
        return comm
    offer = Offer.make(comm.world_size)
    try:
        offers: list[Offer] = comm.all_gather_object(offer)
        if apart := _apart(offers):
            _say(comm, apart)
            return comm
        descriptor, refusal = _opened(offers)
        refusals = comm.all_gather_object(refusal)  # behind it the file is open everywhere
    finally:
        offer.withdraw()
    if any(refusals):
        if descriptor >= 0:
            os.close(descriptor)
        _say(comm, next(text for text in refusals if text))
        return comm
    processes = [offer.process for offer in offers]
    arena = Arena(descriptor, processes=processes, place=comm.rank, ranks=comm.ranks)
    shared = SharedMemory(comm._group, comm._device, arena)
    shared.join(comm)
    return shared


def _apart(offers: Sequence[Offer]) -> str:
    """Say why ranks are not processes of one host; empty if they are."""
    hosts = {(offer.process.space, offer.network) for offer in offers}
    if len(hosts) > 1:
        return f"they are of {len(hosts)} hosts, or of containers that do not see each other's processes"
    if len({offer.process.pid for offer in offers}) < len(offers):
        return "some of them are threads of one process"
    return ""


def _opened(offers: Sequence[Offer]) -> tuple[int, str]:
    """Return a descriptor of the first rank's file, or -1 and why there is none."""
    for offer in offers:
        if offer.refusal:
            return -1, offer.refusal
    try:
        return offers[0].open(), ""
    except OSError as error:
        return -1, f"{offers[0].process} does not share its file: {error}"


def _say(comm: TorchDist, why: str) -> None:
    if dist.get_rank() == comm.ranks[0]:
        warnings.warn(
            f"shared_memory=True: {comm.world_size} ranks reduce through their process group, not in memory "
            f"that they share, which is slower: {why}. leave shared_memory=True out",
            RuntimeWarning,
            stacklevel=2,
        )
