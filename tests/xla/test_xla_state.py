"""A run saved between windows continues in a new engine with the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from xla_cases import ACCUMULATE, OPTIMIZERS, device, loss_sum, micro_batch, mlp

import pyengine as pe

LENGTH = 9


def _train(rank: int, cut: int | None, nonfinite: str) -> list[torch.Tensor]:
    """Train three windows; with `cut`, save after `cut` micro-batches and continue in a new engine."""
    here = device()
    model = mlp().to(here)

    def make():
        optimizer = OPTIMIZERS["adamw"](model.parameters(), capturable=True)
        return pe.GradSync(model, accumulate=ACCUMULATE, nonfinite=nonfinite), optimizer

    sync, optimizer = make()
    for index in range(LENGTH):
        if index == cut:
            states = copy.deepcopy((_on_host(sync.state_dict()), optimizer.state_dict()))
            sync.close()
            sync, optimizer = make()
            optimizer.load_state_dict(states[1])
            sync.load_state_dict(states[0])
        x, y = (tensor.float().to(here) for tensor in micro_batch(rank, index))
        with sync.accumulate():
            sync.backward(loss_sum(model, x, y), count=torch.tensor(len(x)).to(here))
            if sync.is_sync_step:
                sync.clip_grad_norm_(0.5)
                sync.step(optimizer)
    sync.synchronize()
    return [param.detach().cpu() for param in model.parameters()]


def _on_host(value):
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("world", "cut", "nonfinite"), [(1, 3, "raise"), (2, 6, "skip")])
def test_a_run_goes_on_in_a_new_engine(replicas, world, cut, nonfinite):
    straight = replicas(world).run(_train, None, nonfinite)
    resumed = replicas(world).run(_train, cut, nonfinite)
    for one, other in zip(straight, resumed, strict=True):
        assert all(map(torch.equal, one, other))
