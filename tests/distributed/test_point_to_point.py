"""Point-to-point operations: exchanges, which post all receives before sends, and small reductions."""

from __future__ import annotations

import operator
import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import assert_alike, me
from ranks import on_ranks

from pyengine.comm import torch_dist, watch
from pyengine.comm.groups import GroupHandle
from pyengine.comm.torch_dist import PointToPoint, TorchDist

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks()
def test_many_exchanges_meet_in_their_order_and_receive_first():
    """Ranks call at different times."""
    rank, world = me()
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("irecv", "isend"):
            real = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, _real=real, _name=name: order.append(_name) or _real(*a))
        comm = TorchDist(None, CPU)
        under_way = []
        for turn in range(8):
            time.sleep(0.002 * (turn % world == rank))
            num = 100 + turn
            parts = torch.arange(world * num) + 10_000 * rank + 100_000 * turn
            received, gathered = torch.empty_like(parts), torch.empty_like(parts)
            gathered[rank * num :][:num] = parts[:num]
            works = comm.all_to_all(received, parts), comm.all_gather(gathered, gathered[rank * num :][:num])
            under_way.append((works, parts, received, gathered))
        for turn, (works, parts, received, gathered) in enumerate(under_way):
            for work in works:
                work.wait()
            num = 100 + turn
            by_rank = [parts + 10_000 * (r - rank) for r in range(world)]
            assert torch.equal(received, torch.cat([sent[rank * num :][:num] for sent in by_rank]))
            assert torch.equal(gathered, torch.cat([sent[:num] for sent in by_rank]))
        comm.release()
    assert order == (["irecv"] * (world - 1) + ["isend"] * (world - 1)) * 16


@on_ranks(2)
def test_a_wait_that_runs_out_of_time_harms_nothing():
    rank, _ = me()
    exchange = PointToPoint(GroupHandle(None, CPU))
    received = torch.zeros(2)
    if rank == 0:
        work = exchange.all_to_all(received, torch.tensor([1.0, 2.0]))
        with pytest.raises(RuntimeError, match="0:00:00.01"):
            work.wait(timedelta(seconds=0.01))
        assert not work.is_completed() and not work.get_future().done()
        dist.barrier()
    else:
        dist.barrier()
        work = exchange.all_to_all(received, torch.tensor([3.0, 4.0]))
    assert work.wait(timedelta(seconds=60)) and work.is_completed()
    assert work.get_future().wait() is None
    assert received.tolist() == [[1.0, 3.0], [2.0, 4.0]][rank]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), r"interrupted while it posted.*Restart all ranks"),
        (RuntimeError("Connection reset"), r"could not post an earlier.*\(Connection reset\)\. Restart all"),
    ],
    ids=["interrupted", "failed"],
)
@on_ranks(2)
def test_an_exchange_that_was_posted_in_part_is_the_last(error, text):
    exchange = PointToPoint(GroupHandle(None, CPU))
    with mock.patch.object(dist, "isend", side_effect=error), pytest.raises(type(error)):
        exchange.all_to_all(torch.zeros(2), torch.ones(2))
    with pytest.raises(RuntimeError, match=text):
        exchange.all_gather(torch.zeros(2), torch.ones(1))


OPS = {"all_reduce": operator.add, "all_reduce_max": torch.maximum, "all_reduce_or": operator.or_}
REDUCED = [
    *(
        ("all_reduce", dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
    ),
    ("all_reduce_max", torch.int64),
    ("all_reduce_max", torch.uint8),
    ("all_reduce_or", torch.int64),
]


def _terms(dtype: torch.dtype, shape: tuple[int, ...], turn: int, world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(turn)
    return [torch.randint(0, 100, shape, generator=generator).to(dtype) for _ in range(world)]


@pytest.mark.parametrize(("world", "fan_out"), [(2, 4), (3, 1), (3, 4), (4, 1), (4, 2), (4, 4)])
@on_ranks()
def test_small_vectors_are_swapped_or_reduced_over_a_tree(fan_out):
    """Ranks call at different times; with a tree, other code runs collectives of the group in between."""
    rank, world = me()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "_FAN_OUT", fan_out)
        patch.delattr(dist, "all_reduce")
        comm, second = TorchDist(None, CPU), TorchDist(None, CPU)
        under_way = []
        for turn, (name, dtype) in enumerate(REDUCED * 3):
            time.sleep(0.002 * (turn % world == rank))
            terms = _terms(dtype, [(7,), (2, 3), (1,), ()][turn % 4], turn, world)
            flat = terms[rank].clone()
            under_way.append((getattr([comm, second][turn % 2], name)(flat), name, terms, flat))
            if world > 2 and turn % 3 == rank % 3:
                dist.barrier(async_op=True)
        for index, (work, name, (first, *others), flat) in enumerate(under_way):
            work.get_future().wait() if index % 2 else work.wait()
            for other in others:
                first = OPS[name](first, other)
            assert torch.equal(flat, first), (name, flat, first)
        assert comm.max_of(rank, -rank) == [world - 1, 0]
        rounds = torch.randn(500, generator=torch.Generator().manual_seed(rank)).bfloat16()
        comm.all_reduce(rounds).wait()
        patch.undo()
        assert_alike(rounds.tolist())
        dist.barrier()
    for each in (comm, second):
        each.release()


@on_ranks(3)
def test_a_reduction_counts_the_bytes_that_this_rank_sends():
    rank, _ = me()
    with (
        mock.patch.object(torch_dist, "_FAN_OUT", 1),
        mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
    ):
        comm = TorchDist(None, CPU)
        comm.all_reduce(torch.ones(6)).wait()
        comm.max_of(1, 2, 3)
    sent = [call.args[0].nbytes for call in isend.call_args_list]
    assert (comm.traffic.collectives, comm.traffic.bytes_sent) == (2, sum(sent))
    assert sent == [[24, 24], [24] * 4, [24, 24]][rank]
    comm.release()


@on_ranks(3)
def test_what_is_not_small_goes_around_the_ring():
    comm = TorchDist(None, CPU)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as launched:
        for num_bytes in (torch_dist._MAX_SMALL_BYTES, torch_dist._MAX_SMALL_BYTES + 8):
            flat = torch.ones(num_bytes // 8, dtype=torch.int64)
            comm.all_reduce(flat).wait()
            assert flat.eq(3).all()
    assert [call.args[0].nbytes for call in launched.call_args_list] == [torch_dist._MAX_SMALL_BYTES + 8]
    comm.release()


COLLECTIVES = {
    "an exchange": lambda comm: comm.all_to_all(torch.zeros(3), torch.ones(3)),
    "a reduction": lambda comm: comm.all_reduce(torch.ones(3)),
}


def _awaits(collective: str, dead: int) -> None:
    """Launch a collective in which rank `dead` exits instead of taking part."""
    rank, _ = me()
    comm, store = TorchDist(None, CPU), dist.group.WORLD.get_group_store()
    if rank == dead:
        os._exit(3)
    if rank == 1 and dead == 2:  # wait until rank 0 has its error, without even launching an exchange
        work = COLLECTIVES[collective](comm) if collective == "a reduction" else None
        store.set("launched", "")
        store.wait(["known"], timedelta(seconds=20))
        del work
        return
    # The launch itself fails if the other rank has died by then.
    with pytest.raises(RuntimeError, match=f"a collective failed: rank.* {dead} "):
        COLLECTIVES[collective](comm).wait()
    if dead == 2:
        store.wait(["launched"], timedelta(seconds=20))
    store.set("known", "")


@pytest.mark.parametrize(("collective", "dead"), [("an exchange", 2), ("a reduction", 0), ("a reduction", 2)])
def test_a_dead_rank_ends_a_collective_of_those_that_wait_for_it(ranks, collective, dead):
    ends = ranks(3).ends(60, _awaits, collective, dead)
    assert not any(end.is_silent for end in ends)
    assert [end.error for end in ends] == [""] * 3
    assert [end.exit_code for end in ends] == [3 if rank == dead else None for rank in range(3)]


@on_ranks(3)
def test_operations_have_the_timeout_that_the_group_has_now():
    """Rank 0 takes part in neither of the two operations."""
    rank, _ = me()
    comm, store = TorchDist(None, CPU), dist.group.WORLD.get_group_store()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    if rank == 0:
        store.wait(["ended by 1", "ended by 2"], timedelta(seconds=20))
        return
    works = comm.all_reduce(torch.ones(3)), comm.all_gather(torch.zeros(3), torch.ones(1))
    with mock.patch.object(watch, "WAIT_S", 0.0):
        for work in works:
            with pytest.raises(RuntimeError, match="[Tt]ime(d |)out"):
                work.wait()
    store.set(f"ended by {rank}", "")
