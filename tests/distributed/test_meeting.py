"""What ranks agree on before the first forward of a window, and how one that is elsewhere is found."""

from __future__ import annotations

import re

import pytest
import torch
from cases import WORLDS, Integers, engine, me

import pyengine as pe
from pyengine.engine.ahead import meet, share_numbers

STAGE = "begins a window"


def _opened(accumulate: int = 2) -> pe.Sync:
    sync, _ = engine("own", Integers(torch.float32), accumulate=accumulate)
    sync._engine.open()
    return sync


def _numbers() -> tuple[list[int], list[float]]:
    rank, _ = me()
    sync = _opened()
    meet(sync._engine, stage=STAGE)
    return share_numbers(sync._engine, micro_batches=rank, sums=[rank, 0.5])


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_knows_how_many_micro_batches_the_others_have(ranks, world):
    want = list(range(world)), [float(sum(range(world))), 0.5 * world]
    assert ranks(world).run(_numbers) == [want] * world


def _complain(who: int) -> str:
    rank, _ = me()
    sync = _opened()
    problems = ["loader: is odd", "count: is odd"] if rank == who else []
    with pytest.raises(ValueError, match="is odd") as caught:
        meet(sync._engine, stage=STAGE, problems=problems)
    sync.abandon()
    meet(_reopened(sync)._engine, stage=STAGE)
    return str(caught.value)


def _reopened(sync: pe.Sync) -> pe.Sync:
    sync._engine.open()
    return sync


@pytest.mark.parametrize("world", WORLDS)
def test_what_one_rank_complains_of_is_raised_on_all(ranks, world):
    who = world - 1
    prefix = "" if world == 1 else f"rank {who}: "
    want = f"{prefix}loader: is odd; {prefix}count: is odd"
    assert ranks(world).run(_complain, who) == [want] * world


def _one_begins_anew() -> str:
    """Rank 0 has met the others, drops the window and begins it again; the others send it."""
    rank, _ = me()
    sync = _opened(accumulate=1)
    own = sync._engine
    meet(own, stage=STAGE)
    if rank == 0:
        sync.abandon()
        own.open()
        with pytest.raises(RuntimeError, match="different points") as caught:
            meet(own, stage=STAGE)
    else:
        own.window.hand_out(0, last=True, more=False)
        sync.backward(_loss(sync))
        with pytest.raises(RuntimeError, match="different points") as caught:
            sync.grad_norm()
    sync.abandon()
    own.open()
    meet(own, stage=STAGE)  # all are there again
    return str(caught.value)


def _loss(sync: pe.Sync) -> torch.Tensor:
    return sum(param.sum() for param in sync._engine.reducer.params)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_begins_a_window_anew_in_the_middle_of_it_is_found_by_all(ranks, world):
    first, *others = ranks(world).run(_one_begins_anew)
    assert all(other == first for other in others)
    assert re.search(r"rank 0: begins a window; rank 1: sends a window", first)
