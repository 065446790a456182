"""Shared memory as a transport: the ranks of one host reduce in place, in memory that all of them see."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.arena import Arena, Offer
from pyengine.comm.base import Comm, Hosts, Levels, Work, ring_bytes
from pyengine.comm.levels import by_host
from pyengine.comm.local import Local
from pyengine.comm.registered_memory import can_register, register_memory
from pyengine.comm.staged import Staged
from pyengine.comm.torch_dist import TorchDist
from pyengine.comm.watch.process_state import ProcessId
from pyengine.ops.device import runs_ahead

_log = logging.getLogger("pyengine.comm")


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

    can_share_parts = has_own_memory = True

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, arena: Arena) -> None:
        super().__init__(group, device)
        self._arena: Arena | None = arena

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._arena is None:
            return super().allocate(numel, dtype, device)
        return self._arena.allocate(numel, dtype)

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
        return self._reduced(self._arena, flat, is_max=is_max)

    def share_part(self, flat: Tensor, part: slice) -> Work:
        """Launch the second half of a reduction; its bytes have been counted with the first half."""
        flat[: part.start].zero_()
        flat[part.stop :].zero_()
        if self._arena is None:
            return super()._all_reduce(flat, dist.ReduceOp.SUM)
        return self._reduced(self._arena, flat, is_max=False)

    def _reduced(self, arena: Arena, flat: Tensor, *, is_max: bool) -> Work:
        with self.roll_call.named():
            work: Any = arena.reduce(flat, is_max=is_max, timeout_s=self._handle.timeout().total_seconds())
        return self._launched(work, f"an all-reduce of {flat.nbytes} bytes")


class SharedHosts(TorchDist):
    """Collectives of one process group whose ranks are processes of several hosts, on tensors on the CPU.

    A sum runs in the arena of each host first, then each rank sums a part across hosts, and the host's parts
    come together in its arena: a bucket crosses the network once a host. As many ranks of a host take part
    in that as the smallest host has. All other collectives, and types that the arena has not, are the process
    group's.

    Args:
        group: the group; None is the default group.
        device: where the tensors lie.
        levels: within the host, in an arena or by this rank alone, and across hosts; ended by `release`.
    """

    has_own_memory = True

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, levels: Levels) -> None:
        super().__init__(group, device)
        self._by_host = levels

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._by_host.inside.allocate(numel, dtype, device)

    def _part(self, ranks: Sequence[int], *, alone: bool) -> Comm:
        inside = self._by_host.inside
        is_host = inside.can_share_parts and inside.ranks == tuple(self.ranks[r] for r in ranks)
        return inside if is_host else super()._part(ranks, alone=alone)

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        if op != dist.ReduceOp.SUM or not Arena.takes(flat, is_max=False):
            return super()._all_reduce(flat, op)
        return Staged(self._rounds(flat), self._num_rounds(flat), flat.device)

    def _num_rounds(self, flat: Tensor) -> int:
        part = self._by_host.part_of(flat.numel())
        return (2 if self._by_host.inside.world_size > 1 else 0) + (1 if part.stop > part.start else 0)

    def _rounds(self, flat: Tensor) -> Iterator[Work]:
        inside, part = self._by_host.inside, self._by_host.part_of(flat.numel())
        if inside.world_size > 1:
            yield inside.all_reduce(flat)
        if part.stop > part.start:
            yield self._by_host.across.all_reduce(flat[part])
        if inside.can_share_parts:
            yield inside.share_part(flat, part)


def wrong_choice(shared_memory: object) -> list[str]:
    """Say what is wrong with the argument of this name."""
    if type(shared_memory) is bool:
        return []
    return [
        (
            f"shared_memory={shared_memory!r}: need True, ranks of one host reduce in memory that they share "
            "where they can; or False, they never do"
        )
    ]


def problems_of_sharing(comm: Comm, device: torch.device) -> list[str]:
    """Say why ranks cannot share the memory of a device by a transport."""
    if not runs_ahead(device) or isinstance(comm, Local) or can_register(comm):
        return []
    return [
        (
            f"shared_memory=True, and parameters lie on {device}: ranks share memory of the host, or, over "
            "NCCL, of their GPUs; need parameters on the CPU, or a process group with NCCL; or leave it out"
        )
    ]


def share_memory(comm: Comm) -> Comm:
    """Return a transport over the same ranks that reduces in shared memory, of each host where there are
    several, or in memory of GPUs that NCCL has registered; one rank has nothing to share.

    Where no two ranks are of one host, or a host refuses on any of them, all go on by `comm`, and rank 0
    warns and says why.

    Args:
        comm: transport; every rank of it calls this, and its end is the end of what is returned.

    Cost: two gathers of objects.
    """
    if not isinstance(comm, TorchDist) or comm.world_size == 1:
        return comm
    if runs_ahead(comm.device):
        return register_memory(comm)
    offer = Offer.make(comm.world_size)
    try:
        offers: list[Offer] = comm.all_gather_object(offer)
        hosts = by_host([(each.process.space, each.network) for each in offers])
        if apart := _apart(offers, hosts):
            _say(comm, apart)
            return comm
        mine = [offers[rank] for host in hosts if comm.rank in host for rank in host]
        descriptor, refusal = _opened(mine)
        refusals = comm.all_gather_object(refusal)  # behind it the file is open everywhere
    finally:
        offer.withdraw()
    if any(refusals):
        if descriptor >= 0:
            os.close(descriptor)
        _say(comm, next(text for text in refusals if text))
        return comm
    _log.debug("share memory among ranks %s, by host: %s", comm.ranks, hosts)
    levels = comm.split(hosts)
    inside = _shared(levels.inside, descriptor, [each.process for each in mine])
    if inside.world_size == comm.world_size:
        return inside
    shared = SharedHosts(comm.group, comm.device, replace(levels, inside=inside))
    shared.join(comm)
    return shared


def _shared(inside: Comm, descriptor: int, processes: Sequence[ProcessId]) -> Comm:
    """Return a transport over the ranks of this host that reduces in an arena; one rank needs none."""
    if not isinstance(inside, TorchDist):
        os.close(descriptor)
        return inside
    arena = Arena(descriptor, processes=processes, place=inside.rank, ranks=inside.ranks)
    shared = SharedMemory(inside.group, inside.device, arena)
    shared.join(inside)
    return shared


def _apart(offers: Sequence[Offer], hosts: Hosts) -> str:
    """Say why no two ranks are processes of one host; empty if some are."""
    if len(hosts) == len(offers):
        return "each is of another host, or of a container that does not see the others' processes"
    if any(len({offers[rank].process.pid for rank in host}) < len(host) for host in hosts):
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
    _log.debug("fall back to the process group of ranks %s, no shared memory: %s", comm.ranks, why)
    if dist.get_rank() == comm.ranks[0]:
        warnings.warn(
            f"shared_memory=True: {comm.world_size} ranks reduce through their process group, not in memory "
            f"that they share, which is slower: {why}. leave shared_memory=True out",
            RuntimeWarning,
            stacklevel=2,
        )
