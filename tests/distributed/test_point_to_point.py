"""Exchanges of point-to-point transfers: every rank is ready to receive before it sends."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import me
from ranks import on_ranks

from pyengine.comm.torch_dist import PointToPoint, TorchDist

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks()
def test_many_exchanges_meet_in_their_order_and_receive_first():
    """Ranks come at different times."""
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
            sent = parts - 10_000 * rank
            assert torch.equal(
                received, torch.cat([sent[rank * num :][:num] + 10_000 * r for r in range(world)])
            )
            assert torch.equal(gathered, torch.cat([sent[:num] + 10_000 * r for r in range(world)]))
        comm.release()
    assert order == (["irecv"] * (world - 1) + ["isend"] * (world - 1)) * 16


@on_ranks(2)
def test_a_wait_that_runs_out_of_time_harms_nothing():
    rank, _ = me()
    exchange = PointToPoint(lambda: None, (0, 1))
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


def _told_at_once() -> None:
    """Rank 2 has died, and rank 1 comes only when rank 0 has been told."""
    rank, _ = me()
    comm, store = TorchDist(None, CPU), dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["told"], timedelta(seconds=20))
    elif rank == 2:
        os._exit(3)
    else:
        with pytest.raises(RuntimeError):
            comm.all_to_all(torch.zeros(3), torch.ones(3)).wait()
        store.set("told", "")


def test_a_dead_peer_is_told_while_others_are_awaited(ranks):
    first, second, third = ranks(3).ends(60, _told_at_once)
    assert (first.error, second.error, third.exit_code) == ("", "", 3)


@on_ranks(2)
def test_an_exchange_that_was_posted_in_part_is_the_last():
    exchange = PointToPoint(lambda: None, (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            exchange.all_to_all(torch.zeros(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="interrupted while it posted") as told:
        exchange.all_gather(torch.zeros(2), torch.ones(1))
    said = str(told.value)
    assert "Restart all ranks" in said
