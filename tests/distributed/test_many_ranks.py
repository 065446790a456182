"""What a rank sends to create an engine, and for a window, does not grow with the number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import me
from ranks import on_ranks
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm import TorchDist
from pyengine.comm.base import Done
from pyengine.comm.groups import GroupHandle
from pyengine.comm.torch_dist import PointToPoint, _launched_in
from pyengine.gradients.used_anywhere import UsedAnywhere
from pyengine.ops.device import HOST

KINDS = ["engine", "attach"]
CPU = torch.device("cpu")
NUM_PARAMS, ACCUMULATE, WIDTH = 100, 4, 8
# The number of collectives, and the bytes that this rank sends for them.
Sent = tuple[int, int]


def rounds() -> int:
    """Return how many collectives this rank has launched in all process groups; every group has all ranks."""
    groups = c10d._world.pg_map  # no public list
    numbers = sum(group._get_sequence_number_for_group() for group in groups)
    # gloo numbers each point-to-point operation: one to and one from every neighbor in the tree.
    tree = PointToPoint(GroupHandle(None, HOST))
    return numbers - (2 * tree.num_neighbors - 1) * sum(_launched_in.values())


def count_traffic(
    kind: str, *, stall_after_s: float | None = 30.0, init_sync: bool = True
) -> dict[str, Sent]:
    """Create an engine and train two windows; return what this rank has sent, as the engine counts it."""
    torch.manual_seed(0)
    built = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_PARAMS // 2)])
    forward, options = built, {"accumulate": ACCUMULATE, "stall_after_s": stall_after_s}
    if kind == "attach":
        forward = DistributedDataParallel(built, gradient_as_bucket_view=True, init_sync=init_sync)
        sync = pe.attach(forward, **options)
    else:
        sync = pe.GradSync(built, **options)
    traffic = sync._engine.comm.traffic  # records cover windows only
    found = {"making": (traffic.collectives, traffic.bytes_sent)}
    batches = torch.ones(2 * ACCUMULATE, 2, WIDTH)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
    for name, window in zip(("first window", "window"), sync.windows(batches), strict=False):
        for x in window:
            sync.backward(forward(x).sum())
        sync.step(optimizer)
        found[name] = (sync.last_record.collectives, sync.last_record.bytes_on_wire)
    sync.close()
    return found


@contextmanager
def one_of_many(rank: int, world: int) -> Iterator[None]:
    """Simulate one of `world` ranks over gloo that all have equal values: a sum is a multiple of its own.

    A collective of torch's fake process group leaves its input unchanged.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    make, launch = TorchDist.__init__, dist.all_reduce

    def init(self: TorchDist, *arguments: Any) -> None:
        make(self, *arguments)
        self.can_or = True
        self._point_to_point = PointToPoint(self.handle)

    def all_reduce(flat: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        return launch(summed(flat, op), op, **options)

    def over_tree(_: PointToPoint, flat: torch.Tensor, op: Any) -> Done:
        return Done(summed(flat, op))

    def summed(flat: torch.Tensor, op: Any) -> torch.Tensor:
        return flat.mul_(world) if op == dist.ReduceOp.SUM else flat

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        with (
            mock.patch.object(TorchDist, "__init__", init),
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(PointToPoint, "all_reduce", over_tree),
        ):
            yield
    finally:
        dist.destroy_process_group()


def account(kind: str, world: int, rank: int = 0) -> dict[str, Sent]:
    """Return what one of `world` ranks sends; the other ranks are simulated."""
    with one_of_many(rank, world):
        return count_traffic(kind, stall_after_s=None, init_sync=False)


def _counted(kind: str) -> tuple[dict[str, Sent], int]:
    """Return what this rank has counted, and how many collectives gloo counted for creating the engine."""
    launched: list[int] = []
    with mock.patch.object(torch.optim, "SGD", wraps=torch.optim.SGD) as made:
        made.side_effect = lambda *_, **__: launched.append(rounds()) or mock.DEFAULT
        before = rounds()
        found = count_traffic(kind)
    return found, launched[0] - before


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_accounted_traffic_is_what_ranks_count(ranks, kind, world):
    ddps = {"engine": 0, "attach": 3}[kind]  # collectives that DDP's constructor launches
    for rank, (found, launched) in enumerate(ranks(world).run(_counted, kind)):
        assert found == account(kind, world, rank)
        assert found["making"][0] == launched - ddps


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_4096_sends_as_much_as_one_of_64(kind):
    few, many = account(kind, 64), account(kind, 4096)
    for part, (collectives, num_bytes) in few.items():
        assert many[part][0] == collectives and num_bytes > 0
        assert num_bytes <= many[part][1] <= 1.02 * num_bytes  # 2 (W - 1) / W grows by 1.6 %


@on_ranks(3)
def test_several_values_are_compared_in_one_collective():
    rank, _ = me()
    comm = TorchDist(None, CPU)
    (same, places), largest = comm.all_gather_objects([{"of": 3}, "same"], rank, -rank)
    assert (same, places, largest) == ([{"of": 3}] * 3, ["same"] * 3, [2, 0])
    assert comm.traffic.collectives == 1
    (same, places), largest = comm.all_gather_objects([{"of": 3}, "x" * rank], rank)
    assert (same, places, largest) == ([{"of": 3}] * 3, ["", "x", "xx"], [2])


@on_ranks(2)
def test_flags_of_more_parameters_than_a_word_has_bits_name_those_that_no_rank_has_used():
    params = [nn.Parameter(torch.ones(1)) for _ in range(70)]
    for param in params:
        param.grad = torch.ones(1)
    used = [{0, 63, 68}, {0, 64}][me()[0]]
    flags = UsedAnywhere(TorchDist(None, CPU), CPU).all_reduce([index in used for index in range(70)])
    assert flags.drop_unused(params) == [index for index in range(70) if index not in (0, 63, 64, 68)]


def _counts_ahead() -> int:
    """Return the bytes that this rank sends for a window whose counts are read ahead."""
    model = nn.Linear(4, 1)
    sync = pe.GradSync(model, accumulate=2)
    windows = sync.windows([torch.ones(3, 4)] * 6, count=len)
    for _ in range(3):
        before = sync._engine.comm.traffic.bytes_sent
        for x in next(windows):
            sync.backward(model(x).sum())
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    return sync._engine.comm.traffic.bytes_sent - before


def test_counting_ahead_sends_as_much_on_more_ranks(ranks):
    *_, of_three = ranks(3).run(_counts_ahead)
    *_, of_four = ranks(4).run(_counts_ahead)
    assert of_three == of_four
