"""Under attach norms are read bucket by bucket as these land, not from `.grad` behind them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.gradients.ddp.bucket_norms import BucketNorms

# Each wire and each kind of DDP once: wire, accumulator, options.
CASES: dict[str, tuple[pe.wire.Wire, str, dict[str, Any]]] = {
    "copies": (pe.wire.FP32(), "native", {}),
    "views, bf16": (pe.wire.BF16(), "native", {"gradient_as_bucket_view": True}),
    "static graph, int8": (pe.wire.Int8(), "native", {"static_graph": True}),
    "searching, exact": (pe.wire.FP32(), "exact", {"find_unused_parameters": True}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_every_bucket_s_norm_is_read_as_it_lands(case):
    wire, accumulator, options = CASES[case]
    are_complete, copy_if_complete = [], BucketNorms.copy_if_complete

    def noted(self: BucketNorms, final: Any) -> bool:
        are_complete.append(copy_if_complete(self, final))
        return are_complete[-1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
    sync = pe.attach(ddp, accumulate=2, wire=wire, accumulator=accumulator)
    pairs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketNorms, "copy_if_complete", noted)
        for window in sync.windows(torch.randn(6, 4, 5)):
            for x in window:
                sync.backward(ddp(x).square().mean())
            norm = sync.clip_grad_norm_(math.inf)
            sync.unscale_()
            pairs.append(
                (float(norm), float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
            )
            ddp.zero_grad()
    assert are_complete == [True] * 3
    for norm, of_grads in pairs:
        assert norm == pytest.approx(of_grads, rel=1e-6)  # torch's is summed in float32
