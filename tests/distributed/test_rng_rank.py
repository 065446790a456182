"""`seed_rank` on real ranks, whose rank is that of the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import assert_alike
from ranks import on_ranks

import pyengine as pe


@on_ranks(3)
def test_ranks_draw_alike_after_seed_everything_and_differently_after_seed_rank():
    pe.seed_everything(42)
    assert_alike(torch.rand(()).item())
    pe.seed_rank(42)
    drawn = [None] * 3
    dist.all_gather_object(drawn, torch.rand(()).item())
    assert len(set(drawn)) == 3
