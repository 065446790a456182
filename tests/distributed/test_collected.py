"""An engine that nobody refers to is freed, and its model, whatever hooks there are on parameters."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ranks import on_ranks
from sharded_cases import sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _trained(kind: str) -> tuple[weakref.ref, weakref.ref]:
    if kind in ("nested", "replicate"):
        sync, forward = sharded(kind, accumulate=1)
        model: nn.Module = forward
        x = torch.ones(2, 5)
    else:
        model, x = nn.Linear(3, 2), torch.ones(2, 3)
        if kind == "hooked":
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda _: None)
        forward = DistributedDataParallel(model) if kind == "attach" else model
        sync = pe.attach(forward, accumulate=1) if kind == "attach" else pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with sync.accumulate():
            sync.backward(forward(x).sum())
        sync.step(optimizer)
    return weakref.ref(sync._engine), weakref.ref(model)


@pytest.mark.parametrize("kind", ["own", "hooked", "attach", "nested", "replicate"])
@on_ranks(2)
def test_an_engine_and_its_model_are_collected(kind):
    refs = _trained(kind)
    gc.collect()
    assert all(ref() is None for ref in refs)
