"""What ranks agree on before the first forward of a window, and how one that is elsewhere is found."""

from __future__ import annotations

import pytest
import torch
from cases import Integers, engine, me

import pyengine as pe
from pyengine.engine.loop import meet, share_numbers

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


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_knows_how_many_micro_batches_the_others_have(ranks, world):
    want = list(range(world)), [float(sum(range(world))), 0.5 * world]
    assert ranks(world).run(_numbers) == [want] * world
