"""`pe.attach` and `pe.GradSync` accept what Lightning Fabric's `setup` returns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import launched

pytest.importorskip("lightning", reason="needs pyengine[adapters]")

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import pyengine as pe


def _parallelize(model: nn.Module, device_mesh: object) -> nn.Module:
    del device_mesh
    return fully_shard(model)


def _strategy(name: str) -> object:
    if name == "ddp":
        return DDPStrategy(cluster_environment=TorchElasticEnvironment())
    return ModelParallelStrategy(_parallelize)


def _trains(name: str) -> None:
    world = dist.get_world_size()
    with launched():
        fabric = Fabric(accelerator="cpu", devices=world, strategy=_strategy(name))
        fabric.launch()
        model = fabric.setup(nn.Linear(2, 1, bias=False))
        sync = pe.attach(model, accumulate=2)
        for window in sync.windows([torch.full((1, 2), 1.0 + dist.get_rank())] * 2):
            for x in window:
                sync.backward(model(x).sum(), count=1)
            sync.unscale_()
        (grad,) = (param.grad for param in model.parameters())
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert torch.equal(whole, torch.full((1, 2), 1.5))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_model_that_fabric_has_set_up_is_attached(ranks, name):
    ranks(2).run(_trains, name)


def test_grad_sync_takes_the_parameters_behind_fabric_by_their_names():
    model = Fabric(accelerator="cpu", devices=1).setup(nn.Linear(2, 1))
    sync = pe.GradSync(model)
    assert [slot.name for bucket in sync.layout.buckets for slot in bucket.slots] == ["bias", "weight"]
    sync.close()
