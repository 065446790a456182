"""fp32 sums beside DDP's buckets: an aligned layout on accelerators, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pyengine.gradients.ddp import buckets
from pyengine.gradients.ddp.buckets import Fp32DDPBucket

NUMELS = (3, 64, 1, 130)


def _filled(wire: torch.dtype, bad: int | None) -> tuple[Fp32DDPBucket, Tensor]:
    """Return a sum of three micro-batches, and what it has written to the wire."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for numel in NUMELS]
    total = Fp32DDPBucket(params, range(len(NUMELS)))

    def grads() -> list[Tensor]:
        return [torch.randn(numel, generator=generator).bfloat16() for numel in NUMELS]

    for k in range(2):
        mine = grads()
        if bad == k:
            mine[1][5] = torch.inf
        total.deposit(mine)
    last = torch.cat(grads())
    if bad == 2:
        last[4] = torch.nan
    flat = torch.full((sum(NUMELS) + 2,), 7.0, dtype=wire)
    assert total.fill(last, flat, torch.tensor(0.3))
    return total, flat


@pytest.mark.parametrize("bad", [None, 0, 2])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_an_aligned_layout_changes_no_bit_and_no_flag(monkeypatch, wire, bad):
    packed, want = _filled(wire, bad)
    monkeypatch.setattr(buckets, "runs_ahead", lambda device: True)
    aligned, got = _filled(wire, bad)
    assert (packed.plan.offsets, aligned.plan.offsets) == ((0, 3, 67, 68), (0, 64, 128, 192))
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    assert torch.equal(torch.stack(aligned.flagged), torch.stack(packed.flagged))
    for slot in range(len(NUMELS)):
        one, other = (each.slot_state(slot)["sum"].shape for each in (packed, aligned))
        assert one == other == (NUMELS[slot],)


def test_buckets_that_are_aligned_keep_ddp_s_layout(monkeypatch):
    monkeypatch.setattr(buckets, "runs_ahead", lambda device: True)
    total = Fp32DDPBucket([nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (8, 64, 3)], range(3))
    assert total.plan is total._as_sent
