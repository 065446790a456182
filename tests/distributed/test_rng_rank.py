"""`seed_rank` on real ranks: the rank is the process group's."""

from __future__ import annotations

import torch
import torch.distributed as dist

import pyengine as pe


def draw() -> tuple[float, float]:
    pe.seed_everything(42)
    alike = torch.rand(()).item()
    pe.seed_rank(42)
    dist.barrier()  # no rank leaves while another is still connecting
    return alike, torch.rand(()).item()


def test_ranks_draw_alike_after_seed_everything_and_differently_after_seed_rank(ranks):
    alike, apart = zip(*ranks(3).run(draw), strict=True)
    assert len(set(alike)) == 1 and len(set(apart)) == 3
