"""Models for tests of device meshes, and the same training in one float64 process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import assert_alike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pyengine as pe

WINDOWS, ACCUMULATE, ROWS = 2, 3, 4


def mesh_of(**shape: int) -> DeviceMesh:
    """Return a mesh of all ranks with these axes."""
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


class Block(nn.Module):
    """Two linear layers that tensor parallelism shards, and a norm that it does not shard."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Sequence(Block):
    """A norm whose gradients are partial sums under sequence parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the two layers of a block over "tp"."""
    return parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def cut_sequence(model: Sequence, mesh: DeviceMesh) -> nn.Module:
    """Shard a `Sequence` over "tp" with sequence parallelism."""
    plan = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh["tp"], plan)


class Gather(torch.autograd.Function):
    """Stacks the tensors of all ranks of a group; the backward sums their gradients."""

    @staticmethod
    def forward(ctx, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = mine.new_zeros(dist.get_world_size(group), *mine.shape)
        whole[dist.get_rank(group)] = mine
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole[dist.get_rank(ctx.group)], None


class Experts(nn.Module):
    """A layer for all rows, and two experts, of which each row uses one.

    With a group, each of its ranks has one expert, which computes the rows of all ranks in the group.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.group: dist.ProcessGroup | None = None
        self.to(dtype)

    def keep_one(self, group: dist.ProcessGroup) -> None:
        """Keep only the expert whose index is this rank's index in the group."""
        self.experts = nn.ModuleList([self.experts[dist.get_rank(group)]])
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.dense(x))
        takes_first = (x[:, 1:2] > 0).to(x.dtype)
        if self.group is None:
            first, second = (expert(h) for expert in self.experts)
        else:
            rows = Gather.apply(h, self.group)
            everywhere = Gather.apply(self.experts[0](rows), self.group)
            first, second = (rows[dist.get_rank(self.group)] for rows in everywhere)
        return takes_first * first + (1 - takes_first) * second


def micro_batches(shard: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a data shard; rows whose first number is positive are counted."""
    generator = torch.Generator().manual_seed(shard)
    return [torch.randn(ROWS, 6, generator=generator).to(dtype) for _ in range(WINDOWS * ACCUMULATE)]


def count_of(x: Tensor) -> int:
    """Return the number of counted rows."""
    return int((x[:, 0] > 0).sum())


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss, summed over counted rows."""
    return (model(x).to(torch.promote_types(x.dtype, torch.float32)).square().sum(1) * (x[:, 0] > 0)).sum()


def in_one_process(model: nn.Module, shards: list[list[Tensor]]) -> tuple[dict[str, Tensor], list[float]]:
    """Train a copy in float64 on all data; return its parameters by name, and the norms."""
    model = copy.deepcopy(model).double()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for start in range(0, WINDOWS * ACCUMULATE, ACCUMULATE):
        rows = torch.cat([x for shard in shards for x in shard[start : start + ACCUMULATE]]).double()
        (loss_of(model, rows) / count_of(rows)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(model: nn.Module, sync: pe.Sync, data: list[Tensor]) -> list[float]:
    """Train like `in_one_process`; return the norms."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for window in sync.windows(data):
        for x in window:
            sync.backward(loss_of(model, x), count=count_of(x))
        norms.append(sync.clip_grad_norm_(0.1).item())
        sync.step(optimizer)
    return norms


def assert_trained(
    model: nn.Module,
    want: dict[str, Tensor],
    norms: tuple[list[float], list[float]],
    *,
    narrow: bool = False,
) -> None:
    """Compare the parameters with `want`, the two lists of norms, and the norms of all ranks.

    bf16 has 8 bits; parameters are rounded once per step, and gradients once per rank and once per sum.
    """
    tolerance = 3e-2 if narrow or next(model.parameters()).dtype is torch.bfloat16 else 1e-5
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        torch.testing.assert_close(whole.detach().double(), want[name], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*norms, rtol=tolerance, atol=tolerance)
    assert_alike(norms[0])


def assert_resumes(make: Callable[[], tuple[pe.Sync, nn.Module]], data: list[Tensor]) -> None:
    """Assert that a new engine that loads the state after one window computes the same next gradients."""

    def run(data: list[Tensor], state: dict[str, Any] | None) -> tuple[list[list[Tensor]], dict[str, Any]]:
        sync, model = make()
        if state is not None:
            sync.load_state_dict(state)
        found, states = [], []
        for window in sync.windows(data):
            for x in window:
                sync.backward(loss_of(model, x), count=count_of(x))
            sync.unscale_()
            grads = [param.grad for param in model.parameters()]
            found.append([g.full_tensor().clone() if hasattr(g, "full_tensor") else g.clone() for g in grads])
            model.zero_grad()
            states.append(sync.state_dict())
        sync.close()
        return found, states[0]

    whole, state = run(data[: 2 * ACCUMULATE], None)
    rest, _ = run(data[ACCUMULATE : 2 * ACCUMULATE], state)
    assert len(whole) == 2
    for grad, found in zip(whole[1], rest[0], strict=True):
        assert torch.equal(found, grad)
