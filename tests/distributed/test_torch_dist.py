"""torch.distributed as a transport: on the parameters' own device, and without a second copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import me, recorded_warnings
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe
from pyengine.comm import torch_dist
from pyengine.comm.torch_dist import TorchDist


@contextmanager
def _noted(note: Callable[[Tensor], int]) -> Iterator[list[int]]:
    """Yield a list of what `note` returns for each tensor that is broadcast."""
    seen, broadcast = [], dist.broadcast

    def noted(flat: Tensor, **options: object) -> object:
        seen.append(note(flat))
        return broadcast(flat, **options)

    with mock.patch.object(dist, "broadcast", noted):
        yield seen


@pytest.mark.parametrize(
    ("cap_bytes", "sizes"),
    [
        (10**6, [320, 32, 12]),
        (100, [56, 88, 160, 16, 32, 12]),
        (1, [4, 12, 0, 40, 84, 4, 160, 16, 32, 12]),
    ],
)
@on_ranks(2)
def test_parameters_are_broadcast_in_pieces_and_end_with_the_same_bits(cap_bytes, sizes):
    rank, _ = me()
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (3,), (0,), (2, 5), (7, 3), (1,), (40,), (2, 2)]
    rank_0s = [torch.randn(shape, generator=generator) for shape in shapes]
    rank_0s[4] = rank_0s[4].t()  # strided
    rank_0s += [torch.arange(4), torch.randn(6, generator=generator).bfloat16()]
    mine = [t.clone(memory_format=torch.preserve_format) for t in rank_0s]
    for each in mine if rank else ():
        each.zero_()
    assert not mine[4].is_contiguous()
    mine[6] = nn.Parameter(mine[6])
    comm = TorchDist(None, torch.device("cpu"))
    with mock.patch.object(torch_dist, "_PIECE_BYTES", cap_bytes), _noted(Tensor.numel) as seen:
        comm.broadcast_(mine)
    assert seen == sizes
    for got, want in zip(mine, rank_0s, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


@on_ranks(1)
def test_a_tensor_that_is_sent_alone_is_not_copied():
    parameter = nn.Parameter(torch.ones(8))
    with _noted(Tensor.data_ptr) as seen:
        TorchDist(None, torch.device("cpu")).broadcast_([parameter])
    assert seen == [parameter.data_ptr()]


@on_ranks(3)
def test_objects_are_sent_only_where_ranks_differ():
    rank, world = me()
    comm = TorchDist(None, torch.device("cpu"))
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
        assert comm.all_gather_object({"of": world}) == [{"of": 3}] * 3
        assert not gathers.called
        assert comm.all_gather_object("x" * rank) == ["", "x", "xx"]
        assert gathers.called
    assert comm.max_of(rank, -rank, 2**62) == [world - 1, 0, 2**62]


def _unequal(by_rank: list[int]) -> list[str]:
    rank, _ = me()
    with recorded_warnings() as texts:
        pe.GradSync(nn.Linear(1, 1), accumulate=by_rank[rank]).close()
    return [text for text in texts if "by rank" in text]


def test_unequal_numbers_of_micro_batches_are_warned_of_once(ranks):
    assert ranks(2).run(_unequal, [2, 3]) == [[], []]  # as `plan_batch` splits an odd number
    (text,), other = ranks(2).run(_unequal, [2, 8])
    assert "accumulate=[2, 8] by rank" in text and other == []
