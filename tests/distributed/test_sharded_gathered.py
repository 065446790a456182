"""`fully_shard` with `defer_budget_mb=math.inf`: a unit gathers and reduces once per window.

Optimizer states are sharded, and checkpoints resume on other numbers of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import assert_alike, assert_same, integers, me, records_of
from ranks import on_ranks
from sharded_cases import (
    assert_trains_a_window,
    batch,
    loss_of,
    own_batches,
    right_grads,
    sharded,
    whole_grads,
    windows_of,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.adapters.dcp import LoadPlanner

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Products(nn.Module):
    """Two layers whose gradients are integers that do not depend on the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return ((self.first(x) + self.second(x)) * t).sum()


def _engine(owner: str) -> tuple[pe.Sync, nn.Module]:
    model: nn.Module = Products()
    if owner == "DDP":
        model = DistributedDataParallel(model)
        return pe.attach(model, accumulate=3), model
    for part in (model.first, model.second, model):
        fully_shard(part)
    return pe.attach(model, accumulate=3, defer_budget_mb=math.inf), model


def _train(sync: pe.Sync, model: nn.Module, optimizer: torch.optim.Optimizer, windows: range) -> None:
    """Train windows, in which all ranks together have the same 36 items for every world size."""
    rank, world = me()
    for number in windows:
        for k in range(3):
            with sync.accumulate():
                losses = [model(*integers(100 * number + 12 * k + i, 1)) for i in range(rank, 12, world)]
                sync.backward(torch.stack(losses).sum(), count=len(losses))
        sync.step(optimizer)


def _params(model: nn.Module) -> dict[str, Tensor | None]:
    params: dict[str, Any] = dict(model.named_parameters())
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in params.items()
    }


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("adamw", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("sgd", 1), ("sgd", 3), ("adamw", 4)]),
    ],
)
@on_ranks()
def test_parameters_have_the_bits_of_ddp_and_each_rank_the_state_of_its_shards(kind, world):
    sync, model = _engine("DDP")
    _train(sync, model, OPTIMIZERS[kind](model.parameters()), range(3))
    want = _params(model)
    sync.close()
    sync, model = _engine("fully_shard")
    optimizer = OPTIMIZERS[kind](model.parameters())
    _train(sync, model, optimizer, range(3))
    assert_same(_params(model), want)
    name = {"sgd": "momentum_buffer", "adamw": "exp_avg"}[kind]
    for param in model.parameters():
        rows = [len(part) for part in torch.arange(param.shape[0]).tensor_split(world)]
        assert len(optimizer.state[param][name].to_local()) == rows[me()[0]]


@on_ranks(2)
def test_a_window_gathers_and_reduces_each_unit_once_however_many_its_micro_batches():
    """An additional micro-batch adds no collectives; an additional unit adds two."""
    found = {}
    for kind, num_units in (("flat", 1), ("nested", 3)):
        for accumulate in (2, 5):
            sync, model = sharded(kind, accumulate=accumulate, defer_budget_mb=math.inf)
            records = records_of(sync)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for place, data in enumerate(own_batches(2 * accumulate), start=1):
                with sync.accumulate():
                    sync.backward(loss_of(model, data), count=3)
                if place % accumulate == 0:
                    sync.step(optimizer)
            sync.close()
            record = records[-1]
            found[kind, accumulate] = record.collectives - 2 * num_units, record.bytes_on_wire
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("kind", ["nested", "replicate"])
@on_ranks(2)
def test_ranks_with_unequal_data_have_the_right_mean(kind):
    """Micro-batches between the first and the last run no collectives, so padding runs none either."""
    rank, _ = me()
    sync, model = sharded(kind, accumulate=4, defer_budget_mb=math.inf)
    numbers = [7, 5]
    for number, _ in enumerate(windows_of(sync, model, own_batches(numbers[rank]))):
        sync.unscale_()
        mine = [batch(100 * r + k) for r, most in enumerate(numbers) for k in range(4 * number, most)[:4]]
        assert_same(whole_grads(model), right_grads(mine, 3 * len(mine)))
        model.zero_grad()
    assert number == 1


@on_ranks(2)
def test_ranks_that_end_a_window_at_different_micro_batches_raise():
    """Rank 0 ends the window at the second of three micro-batches; rank 1 raises at its own last one."""
    sync, model = sharded("nested", accumulate=3, defer_budget_mb=math.inf)
    with pytest.raises(RuntimeError, match="ranks are at different points of their loops"):
        for place, data in enumerate(own_batches(3), start=1):
            with sync.accumulate(last=me()[0] == 0 and place == 2):
                sync.backward(loss_of(model, data), count=3)
    sync.abandon()
    assert_trains_a_window(sync, model)


def _save(kind: str, folder: str) -> None:
    sync, model = _engine("fully_shard")
    optimizer = OPTIMIZERS[kind](model.parameters())
    _train(sync, model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "sync": sync}, checkpoint_id=folder)


def _go_on(kind: str, folder: str) -> dict[str, Tensor | None]:
    sync, model = _engine("fully_shard")
    optimizer = OPTIMIZERS[kind](model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "sync": sync}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert sync.window == 2
    _train(sync, model, optimizer, range(2, 4))
    params = _params(model)
    assert_alike({name: param.tolist() for name, param in params.items()})
    return params


def _uninterrupted(kind: str) -> dict[str, Tensor | None]:
    sync, model = _engine("DDP")
    _train(sync, model, OPTIMIZERS[kind](model.parameters()), range(4))
    return _params(model)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("adamw", 3),
        pytest.param("sgd", 1, marks=pytest.mark.slow),
        pytest.param("adamw", 4, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_on_another_number_of_ranks(ranks, tmp_path, kind, world):
    want, _ = ranks(2).run(_uninterrupted, kind)
    ranks(2).run(_save, kind, str(tmp_path))
    for params in ranks(world).run(_go_on, kind, str(tmp_path)):
        assert_same(params, want)
