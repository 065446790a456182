"""States of sharded models: gradients that no optimizer has used are saved as each rank's own shards."""

from __future__ import annotations

from typing import Any

import pytest
from cases import assert_same, error_of
from ranks import on_ranks
from sharded_cases import Chain, own_batches, sharded, windows_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pyengine as pe


def _kept(model: nn.Module, sync: pe.Sync) -> dict[str, Any]:
    """Return a state with gradients that no optimizer has used."""
    for _ in windows_of(sync, model, own_batches(3)):
        sync.unscale_()
    return sync.state_dict()


def _shards(model: nn.Module) -> dict[str, Tensor | None]:
    """Return this rank's own parts of the gradients."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else grad.to_local().clone() for name, grad in grads.items()}


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_gradients_that_no_optimizer_has_used_are_each_rank_s_own(accumulator):
    sync, model = sharded("nested", accumulate=3, accumulator=accumulator)
    state = _kept(model, sync)
    want = _shards(model)
    model.zero_grad()
    sync.load_state_dict(state)
    assert_same(_shards(model), want)


@pytest.mark.parametrize("origin", ["nested", "hsdp", "whole"])
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(4)
def test_gradients_that_no_optimizer_has_used_need_as_many_ranks(accumulator, origin):
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "members")).get_group("members")
    options = {"accumulate": 3, "accumulator": accumulator}
    if accumulator == "exact":
        options["accumulator"] = pe.Exact(micro_batches=12)
    if origin == "whole":  # groups of two ranks, whose gradients are not sharded
        model: nn.Module = Chain()
        sync: pe.Sync = pe.GradSync(model, process_group=group, **options)
        state = _kept(model, sync)
        sync.close()
        sync, model = sharded("nested", **options)
    else:
        sync, model = sharded(origin, **options)
        state = _kept(model, sync)
        sync.close()
        model = Chain()
        sync = pe.GradSync(model, process_group=group, **options)
    message = error_of(sync.load_state_dict, state)
    sync.close()
    assert "step every optimizer, or set .grad to None, before sync.state_dict(), or start as many" in message
