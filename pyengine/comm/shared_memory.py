"""Transports in which the ranks of one host reduce in shared memory.

Shared memory is host memory that all ranks of a host can access, or GPU memory that NCCL has registered. GPUs
connected by NVLink reduce registered memory without copies. Source: NCCL's user guide on user buffer
registration and symmetric windows.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.arena import Arena, MemoryOffer
from pyengine.comm.base import Comm, Hosts, Levels, Local, Work, by_host, ring_bytes
from pyengine.comm.groups import GroupHandle, backend_of
from pyengine.comm.staged import Staged
from pyengine.comm.torch_dist import TorchDist
from pyengine.ops.device import runs_ahead

_log = logging.getLogger("pyengine.comm")
_Memory = TypeVar("_Memory", "Arena", "NcclPool")

_GROUP = "through their process group, which is slower than shared memory"
# torch's allocator rounds sizes up to a multiple of this number of bytes.
_ALIGN_BYTES = 512


class _WithMemory(TorchDist, Generic[_Memory]):
    """A transport over one process group, with buffers in an arena or a pool, which `release` closes.

    After `release`, torch's allocator provides the buffers.
    """

    has_own_memory = True

    def __init__(
        self, group: dist.ProcessGroup | GroupHandle | None, device: torch.device, memory: _Memory
    ) -> None:
        super().__init__(group, device)
        self._memory: _Memory | None = memory

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            return super().allocate(numel, dtype, device)
        return self._memory.allocate(numel, dtype)

    def release(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        super().release()


class SharedMemory(_WithMemory[Arena]):
    """A transport for tensors on the CPU, over a process group whose ranks are on one host.

    Reductions run in the shared memory (arena), where every rank sums its part of the buffers of all ranks,
    in rank order, and writes the sum to all buffers. 16-bit dtypes are summed in float32 and rounded once.
    All other collectives and unsupported dtypes use the process group. After `release`, all reductions use
    the process group.
    """

    def __init__(
        self, group: dist.ProcessGroup | GroupHandle | None, device: torch.device, arena: Arena
    ) -> None:
        super().__init__(group, device, arena)
        self.can_or = False  # a maximum in the arena is faster

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        is_max = op == dist.ReduceOp.MAX
        if self._memory is None or not self._memory.supports(flat, is_max=is_max):
            return super()._all_reduce(flat, op)
        self.traffic.count(ring_bytes(flat.nbytes, self.world_size))
        return self._reduce_in(self._memory, flat, is_max=is_max)

    def share_part(self, flat: Tensor, part: slice) -> Work:
        """Launch a collective that completes a buffer to which each rank contributes a part.

        On each rank, the elements outside `part` are first set to 0. This collective is the second half of a
        reduction, and the first half counts the bytes of both halves.
        """
        flat[: part.start].zero_()
        flat[part.stop :].zero_()
        if self._memory is None:
            return super()._all_reduce(flat, dist.ReduceOp.SUM)
        return self._reduce_in(self._memory, flat, is_max=False)

    def _reduce_in(self, arena: Arena, flat: Tensor, *, is_max: bool) -> Work:
        with self.roll_call.named():
            work: Any = arena.reduce(flat, is_max=is_max, timeout_s=self.handle.timeout().total_seconds())
        return self._launched(work, f"an all-reduce of {flat.nbytes} bytes")


class SharedHosts(TorchDist):
    """A transport for tensors on the CPU, over a process group whose ranks are on several hosts.

    A sum first runs in the shared memory of each host. Then each rank sums a part across hosts, and the parts
    are collected in the shared memory, so a bucket crosses the network once per host. The number of summing
    ranks per host is the size of the smallest host. All other collectives and unsupported dtypes use the
    process group.
    """

    has_own_memory = True

    def __init__(
        self, group: dist.ProcessGroup | GroupHandle | None, device: torch.device, levels: Levels
    ) -> None:
        super().__init__(group, device)
        self._by_host = levels

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._by_host.inside.allocate(numel, dtype, device)

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        if op != dist.ReduceOp.SUM or not Arena.supports(flat, is_max=False):
            return super()._all_reduce(flat, op)
        part, inside, across = self._by_host.part_of(flat.numel()), self._by_host.inside, self._by_host.across
        rounds: list[Callable[[], Work]] = []
        if isinstance(inside, SharedMemory):  # otherwise this host has no other rank of the group
            rounds.append(lambda: inside.all_reduce(flat))
        if part.stop > part.start:
            rounds.append(lambda: across.all_reduce(flat[part]))
        if isinstance(inside, SharedMemory):
            rounds.append(lambda: inside.share_part(flat, part))
        return Staged((launch() for launch in rounds), len(rounds), flat.device)


def wrong_choice(shared_memory: object) -> list[str]:
    if type(shared_memory) is bool:
        return []
    need = "expected True (reduce in memory that the ranks of one host share) or False"
    return [f"shared_memory={shared_memory!r}: {need}"]


def problems_of_sharing(comm: Comm, device: torch.device) -> list[str]:
    """Describe why the ranks of a transport cannot share memory of a device."""
    if not runs_ahead(device) or isinstance(comm, Local) or can_register(comm):
        return []
    return [
        (
            f"shared_memory=True, but parameters are on {device}: ranks can share host memory or, over NCCL, "
            "GPU memory; move the parameters to the CPU, use a process group with NCCL, or leave "
            "shared_memory=True out"
        )
    ]


def share_memory(comm: Comm) -> Comm:
    """Return a transport over the same ranks, with reductions in shared memory.

    Shared memory is host memory, or GPU memory that NCCL has registered. If no two ranks are on one host, or
    any rank cannot share memory, all ranks use `comm`, and rank 0 issues a warning with the reason. Every
    rank must call this; the result is released together with `comm`.

    Cost: two gathers of objects.
    """
    if not isinstance(comm, TorchDist) or comm.world_size == 1:
        return comm
    if runs_ahead(comm.device):
        return register_memory(comm)
    offer = MemoryOffer.make(comm.world_size)
    try:
        offers: list[MemoryOffer] = comm.all_gather_object(offer)
        hosts = by_host([(each.process.space, each.network) for each in offers])
        if reason := _no_shared_host(offers, hosts):
            _warn_of_fallback(comm, _GROUP, reason)
            return comm
        mine = [offers[rank] for host in hosts if comm.rank in host for rank in host]
        descriptor, refusal = _open_file(mine)
        refusals = comm.all_gather_object(refusal)  # after this call all ranks have opened the file
    finally:
        offer.withdraw()
    if any(refusals):
        if descriptor >= 0:
            os.close(descriptor)
        _warn_of_fallback(comm, _GROUP, next(text for text in refusals if text))
        return comm
    _log.debug("share memory among ranks %s, by host: %s", comm.ranks, hosts)
    levels = comm.split(hosts)
    inside = levels.inside
    if isinstance(inside, TorchDist):
        processes = [each.process for each in mine]
        arena = Arena(descriptor, processes=processes, place=inside.rank, ranks=inside.ranks)
        inside = SharedMemory(inside.handle, inside.device, arena)
        inside.join(levels.inside)
    else:  # a single rank needs no arena
        os.close(descriptor)
    if inside.world_size == comm.world_size:
        return inside
    shared = SharedHosts(comm.handle, comm.device, replace(levels, inside=inside))
    shared.join(comm)
    return shared


def _no_shared_host(offers: Sequence[MemoryOffer], hosts: Hosts) -> str:
    if len(hosts) == len(offers):
        return "each is on a different host, or in a container that does not see the other processes"
    if any(len({offers[rank].process.pid for rank in host}) < len(host) for host in hosts):
        return "some of them are threads of one process"
    return ""


def _open_file(offers: Sequence[MemoryOffer]) -> tuple[int, str]:
    """Open the file of the first rank; return its descriptor and "", or -1 and the reason for a failure."""
    for offer in offers:
        if offer.refusal:
            return -1, offer.refusal
    try:
        return offers[0].open(), ""
    except OSError as error:
        return -1, f"{offers[0].process} does not share its file: {error}"


def _warn_of_fallback(comm: TorchDist, way: str, why: str) -> None:
    _log.debug("ranks %s reduce %s: %s", comm.ranks, way, why)
    if dist.get_rank() == comm.ranks[0]:
        warnings.warn(
            f"leave shared_memory=True out: {comm.world_size} ranks reduce {way}: {why}",
            RuntimeWarning,
            stacklevel=2,
        )


# ---- GPU memory ----


class NcclPool:
    """Memory that NCCL allocates and registers with one communicator, which must already exist.

    Every rank must create a pool and allocate the same sizes in the same order, because registration is a
    collective. If registered memory is not supported, NCCL or torch raises an exception, whose type varies.
    """

    def __init__(self, comm: TorchDist) -> None:
        self._device, self._backend = comm.device, backend_of(comm.group, comm.device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        self._backend.register_mem_pool(self._pool, symm=True)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros, of shape `[numel]`."""
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            return torch.zeros(numel, dtype=dtype, device=self._device)

    def close(self) -> None:
        """End the registration; tensors of the pool keep their memory."""
        self._backend.deregister_mem_pool(self._pool)


class RegisteredMemory(_WithMemory[NcclPool]):
    """A transport over one NCCL process group, with buffers in memory that NCCL has registered."""

    def reserve(self, sizes: Sequence[int]) -> None:
        if self._memory is not None:
            num_bytes = sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
            self._memory.allocate(num_bytes, torch.uint8)  # free it now, so that the next buffers reuse it


def can_register(comm: Comm) -> bool:
    return comm.backend == "nccl"


def register_memory(comm: TorchDist) -> TorchDist:
    """Return a transport over the same ranks, with buffers in registered memory.

    If NCCL fails to register memory on any rank, all ranks use `comm`, and the first rank issues a warning
    with the reason. Every rank must call this; the result is released together with `comm`.

    Cost: an all-reduce of one element and a gather of objects.
    """
    first = torch.zeros(1, dtype=torch.float32, device=comm.device)
    comm.all_reduce(first).wait()  # the first collective creates the communicator
    pool: NcclPool | None = None
    refusal = ""
    try:
        pool = NcclPool(comm)
    except Exception as error:  # noqa: BLE001 - all ranks gather the reason
        refusal = f"{type(error).__name__}: {error}"
    refusals = comm.all_gather_object(refusal)
    if why := next((text for text in refusals if text), ""):
        if pool is not None:
            pool.close()
        _warn_of_fallback(comm, "in memory that NCCL has not registered, which may be slower", why)
        return comm
    assert pool is not None
    _log.debug("reduce in memory that NCCL has registered, ranks %s", comm.ranks)
    registered = RegisteredMemory(comm.handle, comm.device, pool)
    registered.join(comm)
    return registered
