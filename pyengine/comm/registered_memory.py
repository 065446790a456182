"""GPU memory that NCCL has registered: GPUs connected by NVLink reduce in it without copies.

Source: NCCL's user guide on user buffer registration and symmetric windows.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.comm.groups import backend_of
from pyengine.comm.torch_dist import TorchDist

_log = logging.getLogger("pyengine.comm")

# torch's allocator rounds sizes up to a multiple of this.
_ALIGN_BYTES = 512


class Pool(Protocol):
    """Device memory that a backend has registered."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, `[numel]`, in memory of the pool, which lives as long as the tensor."""

    def close(self) -> None:
        """End the registration; tensors of the pool keep their memory."""


class NcclPool:
    """Memory that NCCL allocates and registers with one communicator.

    Every rank makes it, and allocates the same sizes in the same order: registration is collective.

    Args:
        comm: transport over the ranks, whose communicator has been used.

    Raises:
        Exception: of any type that NCCL or torch raises where it has no such memory.
    """

    def __init__(self, comm: TorchDist) -> None:
        self._device, self._backend = comm.device, backend_of(comm.group, comm.device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        self._backend.register_mem_pool(self._pool, symm=True)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            return torch.zeros(numel, dtype=dtype, device=self._device)

    def close(self) -> None:
        self._backend.deregister_mem_pool(self._pool)


class RegisteredMemory(TorchDist):
    """Collectives of one process group over NCCL, on buffers in memory that NCCL has registered.

    Args:
        group: the group; None is the default group.
        device: device of the tensors.
        pool: of the memory; `release` ends it, and buffers come from torch's allocator from then on.
    """

    has_own_memory = True

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, pool: Pool) -> None:
        super().__init__(group, device)
        self._pool: Pool | None = pool

    def reserve(self, sizes: Sequence[int]) -> None:
        if self._pool is not None:
            num_bytes = sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
            self._pool.zeros(num_bytes, torch.uint8)  # freed at once: the next buffers are parts of it

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._pool is None:
            return super().allocate(numel, dtype, device)
        return self._pool.zeros(numel, dtype)

    def release(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        super().release()


def can_register(comm: Comm) -> bool:
    """Whether the backend of a transport is NCCL, which registers memory."""
    return comm.backend == "nccl"


def register_memory(comm: TorchDist) -> TorchDist:
    """Return a transport over the same ranks whose buffers are in registered memory.

    If NCCL refuses on any rank, all ranks use `comm`, and the first rank warns and gives the reason.

    Args:
        comm: transport over NCCL; every rank of it calls this. The result is released together with it.

    Cost: an all-reduce of one element, and a gather of objects.
    """
    pool, refusal = _make_pool(comm)
    refusals = comm.all_gather_object(refusal)
    if why := next((text for text in refusals if text), ""):
        if pool is not None:
            pool.close()
        _log.debug("fall back to memory that NCCL has not registered, ranks %s: %s", comm.ranks, why)
        if dist.get_rank() == comm.ranks[0]:
            warnings.warn(
                f"leave shared_memory=True out: {comm.world_size} ranks reduce in memory that NCCL has not "
                f"registered, which may be slower: {why}",
                RuntimeWarning,
                stacklevel=2,
            )
        return comm
    assert pool is not None
    _log.debug("reduce in memory that NCCL has registered, ranks %s", comm.ranks)
    registered = RegisteredMemory(comm.group, comm.device, pool)
    registered.join(comm)
    return registered


def _make_pool(comm: TorchDist) -> tuple[NcclPool | None, str]:
    """Return a pool, or the reason why there is none."""
    first = torch.zeros(1, dtype=torch.float32, device=comm.device)
    comm.all_reduce(first).wait()  # the first collective makes the communicator
    try:
        return NcclPool(comm), ""
    except Exception as error:  # noqa: BLE001 - all ranks gather the reason
        return None, f"{type(error).__name__}: {error}"
