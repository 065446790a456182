"""torch.distributed as a transport: on the parameters' own device, and without a second copy of the model."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from cases import me
from torch import nn

import pyengine as pe
from pyengine.comm import torch_dist
from pyengine.comm.torch_dist import TorchDist


def _broadcast(cap_bytes: int) -> list[int]:
    """Broadcast tensors of odd kinds; return the elements of each collective."""
    rank, _ = me()
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (3,), (0,), (2, 5), (7, 3), (1,), (40,), (2, 2)]
    rank_0s = [torch.randn(shape, generator=generator) for shape in shapes]
    rank_0s[4] = rank_0s[4].t()  # strided
    rank_0s += [torch.arange(4), torch.randn(6, generator=generator).bfloat16()]
    mine = [
        t.clone(memory_format=torch.preserve_format) if rank == 0 else torch.zeros_like(t) for t in rank_0s
    ]
    assert not mine[4].is_contiguous()
    mine[6] = torch.nn.Parameter(mine[6])
    comm, sizes, broadcast = TorchDist(None, torch.device("cpu")), [], dist.broadcast
    torch_dist._PIECE_BYTES = cap_bytes
    torch_dist.dist.broadcast = lambda flat, **options: (
        sizes.append(flat.numel()),
        broadcast(flat, **options),
    )[1]
    try:
        comm.broadcast_(mine)
    finally:
        torch_dist.dist.broadcast, torch_dist._PIECE_BYTES = broadcast, 256 * 2**20
    for got, want in zip(mine, rank_0s, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
    return sizes


@pytest.mark.parametrize(
    ("cap_bytes", "sizes"),
    [
        (10**6, [320, 32, 12]),
        (100, [56, 88, 160, 16, 32, 12]),
        (1, [4, 12, 0, 40, 84, 4, 160, 16, 32, 12]),
    ],
)
def test_parameters_are_broadcast_in_pieces_and_end_with_the_same_bits(ranks, cap_bytes, sizes):
    assert ranks(2).run(_broadcast, cap_bytes) == [sizes] * 2


def _large_alone() -> bool:
    """Whether a tensor that is a piece of its own travels in its own memory."""
    parameter, sent, broadcast = torch.nn.Parameter(torch.ones(8)), [], dist.broadcast
    torch_dist.dist.broadcast = lambda flat, **options: (
        sent.append(flat.data_ptr()),
        broadcast(flat, **options),
    )[1]
    try:
        TorchDist(None, torch.device("cpu")).broadcast_([parameter])
    finally:
        torch_dist.dist.broadcast = broadcast
    return sent == [parameter.data_ptr()]


def test_a_tensor_that_is_sent_alone_is_not_copied(ranks):
    assert ranks(1).run(_large_alone) == [True]


def _current_devices() -> list[str]:
    """Return what was current when a transport for cuda:1 called what takes no device, before and after."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def device_index(index):
        before, current[0] = current[0], f"cuda:{index}"
        yield
        current[0] = before

    def note(*arguments, **options):
        seen.append(current[0])

    kept = torch.accelerator.device_index, dist.broadcast
    comm = TorchDist(None, torch.device("cuda", 1))
    torch.accelerator.device_index, dist.broadcast = device_index, note
    try:
        comm.broadcast_([torch.ones(2)])
    finally:
        torch.accelerator.device_index, dist.broadcast = kept
    return [*seen, *current]


def test_collectives_without_a_device_of_their_own_go_through_the_parameters_device(ranks):
    assert ranks(1).run(_current_devices) == [["cuda:1", "cuda:0"]]


def _agreements() -> tuple[list[object], list[object], int]:
    rank, world = me()
    comm, gathers = TorchDist(None, torch.device("cpu")), []
    real = dist.all_gather_object
    dist.all_gather_object = lambda *args, **options: (gathers.append(1), real(*args, **options))[1]
    try:
        alike = comm.all_gather_object({"of": world})
        before = len(gathers)
        differ = comm.all_gather_object("x" * rank)
    finally:
        dist.all_gather_object = real
    assert comm.max_of(rank, -rank, 2**62) == [world - 1, 0, 2**62]
    return alike, differ, before


def test_objects_are_sent_only_where_ranks_differ(ranks):
    for alike, differ, before in ranks(3).run(_agreements):
        assert (alike, differ, before) == ([{"of": 3}] * 3, ["", "x", "xx"], 0)


def _unequal(by_rank: list[int]) -> list[str]:
    rank, _ = me()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pe.GradSync(nn.Linear(1, 1), accumulate=by_rank[rank]).close()
    return [str(one.message) for one in caught if "by rank" in str(one.message)]


def test_unequal_numbers_of_micro_batches_are_warned_of_once(ranks):
    assert ranks(2).run(_unequal, [2, 3]) == [[], []]  # as `plan_batch` splits an odd number
    (text,), other = ranks(2).run(_unequal, [2, 8])
    assert "accumulate=[2, 8] by rank" in text and other == []
