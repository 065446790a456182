"""PEFT's LoRA models with GradSync, DDP and FSDP2: only the adapters are trained."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from twin import CLOSE, LR, Net
from worlds import items

import pyengine as pe

os.environ |= {"HF_HUB_OFFLINE": "1"}
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: requirements-dev.txt")

ACCUMULATE = 2
OWNERS = ["GradSync", "ddp", "fully_shard"]


def _lora() -> Any:
    """Return the net with adapters; both factors are nonzero, so that both have gradients."""
    import peft

    config = peft.LoraConfig(target_modules=["first", "second"], r=2, lora_alpha=4, init_lora_weights=False)
    return peft.get_peft_model(Net(), config)


def _seen(rank: int) -> list[Tensor]:
    """Return a rank's micro-batches, of different sizes; the last window is short, and rank 1 has fewer."""
    return [items(1 + (index + rank) % 3, seed=10 * rank + index) / 8 for index in range(5 - 2 * rank)]


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _sum_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def _train(owner: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Train an epoch and save the adapters; return the parameters after and before, and an output."""
    model = _lora()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    forward: nn.Module = model
    if owner == "fully_shard":
        base, mesh = model.get_base_model(), init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (base.first, base.second, model):
            fully_shard(unit, mesh=mesh)
        sync = pe.attach(model, accumulate=ACCUMULATE)
    elif owner == "ddp":
        forward = DistributedDataParallel(model)
        sync = pe.attach(forward, accumulate=ACCUMULATE)
    else:
        sync = pe.GradSync(model, accumulate=ACCUMULATE)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)
    for window in sync.windows(_seen(dist.get_rank())):
        for x in window:
            sync.backward(_sum_of(forward, x), count=len(x))
        sync.step(optimizer)
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)
    sync.close()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    output = model(items(2) / 8).detach()
    return {name: _whole(param) for name, param in model.named_parameters()}, before, output


def _right(world: int) -> dict[str, Tensor]:
    """Return the parameters after training in one float64 process."""
    model = _lora().double()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)
    for start in range(0, 5, ACCUMULATE):
        x = torch.cat([x for rank in range(world) for x in _seen(rank)[start : start + ACCUMULATE]]).double()
        optimizer.zero_grad()
        (_sum_of(model, x) / len(x)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("world", [1, 2])
def test_adapters_train_on_the_mean_over_all_ranks_and_the_base_is_unchanged(ranks, tmp_path, world, owner):
    (trained, before, output), *others = ranks(world).run(_train, owner, str(tmp_path))
    assert all(torch.equal(trained[name], other[name]) for other, *_ in others for name in trained)
    for name, right in _right(world).items():
        if right.requires_grad:
            assert not torch.equal(trained[name], before[name])
            torch.testing.assert_close(trained[name].double(), right.detach(), **CLOSE)
        else:
            assert torch.equal(trained[name], before[name])
    import peft

    loaded = peft.PeftModel.from_pretrained(Net(), tmp_path)
    assert torch.equal(loaded(items(2) / 8), output)
