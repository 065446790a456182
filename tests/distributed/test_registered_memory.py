"""Buffers in memory that NCCL has registered: which buffers use it, and what happens if NCCL refuses.

Here a pool of host memory replaces NCCL's pool. On a GPU, the last test registers real memory.
"""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Integers, me, windows_of_integers
from ranks import on_ranks
from torch import nn

import pyengine as pe
from pyengine.comm import TorchDist, shared_memory
from pyengine.comm.shared_memory import RegisteredMemory, register_memory

CPU = torch.device("cpu")


class _Pool:
    """A fake pool that records the sizes of its allocations."""

    made: list[_Pool] = []  # noqa: RUF012 - pools of the current test

    def __init__(self, comm: TorchDist) -> None:
        self.sizes: list[int] = []
        self.is_open = True
        self.made.append(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.sizes.append(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    def close(self) -> None:
        self.is_open = False


class _Refuses(_Pool):
    def __init__(self, comm: TorchDist) -> None:
        super().__init__(comm)
        if comm.rank == comm.world_size - 1:
            raise NotImplementedError("no such memory")


def _with_pool(pool: type[_Pool]) -> mock._patch:
    pool.made = []
    return mock.patch.object(shared_memory, "NcclPool", pool)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_buckets_that_travel_come_from_the_pool_in_one_piece():
    _, world = me()
    # Two ranks have counts that are powers of two, so gradients are exact on a narrow wire too.
    wire = pe.wire.BF16() if world == 2 else pe.wire.FP32()
    model = Integers(torch.float32)
    with (
        _with_pool(_Pool),
        mock.patch.object(shared_memory, "runs_ahead", lambda device: True),
        mock.patch.object(shared_memory, "can_register", lambda comm: True),
    ):
        sync = pe.GradSync(model, accumulate=2, wire=wire, bucket_cap_mb=1e-5, shared_memory=True)
    if world == 1:
        assert not _Pool.made  # one rank has nothing to share
        return
    (pool,) = _Pool.made
    whole, *sizes = pool.sizes
    assert len(sizes) == len(sync.layout.buckets) > 1 and whole >= sum(sizes)  # a whole, then its parts
    windows_of_integers(sync, model, model)
    sync.close()
    assert not pool.is_open


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_where_nccl_refuses_on_a_rank_all_go_on_without_and_the_first_says_why():
    rank, world = me()
    comm = TorchDist(None, CPU)
    with _with_pool(_Refuses), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert register_memory(comm) is comm
    assert len(caught) == (rank == 0)
    for each in caught:
        assert "that NCCL has not registered" in str(each.message)
        assert "NotImplementedError: no such memory" in str(each.message)
    assert [pool.is_open for pool in _Refuses.made] == [rank == world - 1]  # closed where creation succeeded


@on_ranks(2)
def test_memory_of_a_device_is_not_shared_over_another_backend_than_nccl():
    on_device = mock.patch.object(shared_memory, "runs_ahead", lambda device: True)
    with on_device, pytest.raises(ValueError, match="use a process group with NCCL"):
        pe.GradSync(nn.Linear(2, 2), shared_memory=True)


def _registers() -> list[float]:
    torch.cuda.set_device(0)
    comm = TorchDist(None, torch.device("cuda", 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registered = register_memory(comm)
    if not isinstance(registered, RegisteredMemory):  # NCCL or the machine has no such allocator
        assert registered is comm
        assert ["that NCCL has not registered" in str(each.message) for each in caught] == [True]
    else:
        assert not caught
    registered.reserve([2**21, 2**20])
    flats = [registered.allocate(2**19, kind, comm.device) for kind in (torch.float32, torch.bfloat16)]
    for flat in flats:
        flat.fill_(3)
        registered.all_reduce(flat).wait()
    found = [flat.float().mean().item() for flat in flats]
    registered.release()
    dist.barrier()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_reduces_in_memory_that_it_has_registered(ranks):
    assert ranks(1).over("nccl").run(_registers) == [[3.0, 3.0]]
