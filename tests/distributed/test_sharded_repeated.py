"""Exact sums add the gradients of all uses of a bf16 parameter as autograd does, for every owner."""

from __future__ import annotations

import pytest
import torch
from cases import me
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


class Tied(nn.Module):
    """An embedding that is also the head, and a layer that is called four times."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, dtype=dtype)
        self.layer = nn.Linear(8, 8, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for _ in range(4):
            hidden = torch.tanh(self.layer(hidden))
        return (hidden @ self.embedding.weight.T).float().logsumexp(-1).sum()


def _wrapped(owner: str, model: nn.Module, reduce: torch.dtype | None) -> tuple[pe.Sync, nn.Module]:
    options = {"accumulate": 2, "accumulator": "exact"}
    if owner == "own":
        return pe.GradSync(model, **options), model
    if owner == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard = replicate if owner == "replicate" else fully_shard
        names = ("replicas", "shards")
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names) if owner == "hsdp" else None
        shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    return pe.attach(model, **options), model


def _bits(
    owner: str, reduce: torch.dtype | None, twice: bool, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    rank, _ = me()
    torch.manual_seed(3)
    model = Tied(dtype)
    sync, forward = _wrapped(owner, model, reduce)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        with sync.accumulate(), sync.micro_batch(count=8) as mb:
            for _ in range(2 if twice else 1):
                mb.backward(forward(torch.randint(0, 11, (1, 8), generator=generator)))
    sync.unscale_()
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]


@pytest.mark.parametrize(
    ("owner", "reduce", "twice"),
    [("fsdp", None, False), ("hsdp", torch.float32, True), ("replicate", None, True)],
)
def test_uses_of_a_parameter_are_added_alike_by_every_owner(ranks, owner, reduce, twice):
    want = ranks(2).run(_bits, "own", None, twice)[0]
    assert all(map(torch.equal, ranks(2).run(_bits, "ddp", None, twice)[0], want))
    for got in ranks(2).run(_bits, owner, reduce, twice):
        assert all(map(torch.equal, got, want))


def test_a_narrow_reduce_dtype_does_not_round_exact_sums(ranks):
    want = ranks(2).run(_bits, "own", None, False, torch.float32)[0]
    for got in ranks(2).run(_bits, "fsdp", torch.bfloat16, False, torch.float32):
        assert all(map(torch.equal, got, want))
