"""Models for `fully_shard` and `replicate`, and the gradients of one float64 process for the same data.

All values are small integers, so a window's gradient has one right answer, bit for bit:
`float32(sum of integers) * float32(1 / count)`. The gradients of one micro-batch are exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases import Batch, assert_same, me
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import pyengine as pe

# Ways to shard, each with a number of ranks.
KINDS = [("flat", 3), ("nested", 2), ("hsdp", 4), ("replicate", 2)]
# Micro-batches of each rank; accumulate is 3, so windows are short or only padding on some ranks.
PLAN = [7, 3, 5, 1]


class Chain(nn.Module):
    """Two layers and parameters of the root; some batches do not use `sometimes`; none uses `first.never`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3, dtype=dtype)
        self.second = nn.Linear(3, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones(3, dtype=dtype))
        self.first.never = nn.Parameter(torch.ones(7, dtype=dtype))
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        """Return `[items, 3]`."""
        hidden = self.second(self.first(x)) * self.scale
        return hidden + self.sometimes if extra else hidden


def batch(seed: int, items: int = 3) -> Batch:
    """Return one micro-batch of small integers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (items, 5), generator=generator).float()
    t = torch.randint(-1, 2, (items, 3), generator=generator).float()
    return x, t


def items(rank: int, number: int) -> int:
    """Return the size of a rank's micro-batch, from 1 to 4."""
    return 1 + (rank + 2 * number) % 4


def loss_of(model: nn.Module, data: Batch, *, extra: bool = False) -> Tensor:
    """Return the loss, summed over items."""
    x, t = data
    return (model(x, extra=extra).to(t.dtype) * t).sum()


def shard(model: nn.Module, kind: str, *, narrow: bool = False, **options: Any) -> nn.Module:
    """Shard a `Chain`; `narrow` computes in bfloat16 and sums in float32."""
    world = dist.get_world_size()
    if narrow:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    wrap = replicate if kind == "replicate" else fully_shard
    if kind != "flat":
        wrap(model.first, **options)
        wrap(model.second, **options)
    return wrap(model, **options)


def sharded(
    kind: str, *, accumulate: int = 3, narrow: bool = False, **options: Any
) -> tuple[pe.Sync, nn.Module]:
    """Return an engine over a sharded `Chain`, and the model."""
    model = shard(Chain(), kind, narrow=narrow)
    return pe.attach(model, accumulate=accumulate, **options), model


def whole_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the unsharded gradients; every rank must call this.

    Elements that this rank has are its own, even if other ranks have replicas of them. This takes one
    collective, `full_tensor` two per parameter.
    """
    grads = {name: param.grad for name, param in model.named_parameters()}
    shards = {name: grad for name, grad in grads.items() if isinstance(grad, DTensor)}
    if not shards:
        return grads
    mine = {}
    for name, grad in shards.items():
        _, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
        mine[name] = (offset, grad.to_local())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    whole = {name: mine[name][1].new_full(grad.shape, torch.nan) for name, grad in shards.items()}
    for parts in (*everybody, mine):
        for name, (offset, part) in parts.items():
            region = [slice(start, start + size) for start, size in zip(offset, part.shape, strict=True)]
            whole[name][tuple(region)] = part
    return {**grads, **whole}


def right_grads(
    batches: Iterable[Batch], count: float, *, extras: Iterable[Batch] = ()
) -> dict[str, Tensor | None]:
    """Return the mean gradient of one float64 process; `extras` are batches that also use `sometimes`."""
    twin = Chain(torch.float64)
    for x, t in batches:
        loss_of(twin, (x.double(), t.double())).backward()
    for x, t in extras:
        loss_of(twin, (x.double(), t.double()), extra=True).backward()
    inverse = torch.tensor(1.0 / count, dtype=torch.float64).float()
    return {
        name: None if param.grad is None else param.grad.float() * inverse
        for name, param in twin.named_parameters()
    }


def own_batches(number: int) -> list[Batch]:
    """Return the first `number` micro-batches of this rank, with 3 items each."""
    rank, _ = me()
    return [batch(100 * rank + index) for index in range(number)]


def all_batches(numbers: Sequence[int]) -> list[Batch]:
    """Return the micro-batches of all ranks, given the number of each rank."""
    return [batch(100 * rank + index) for rank, number in enumerate(numbers) for index in range(number)]


def windows_of(sync: pe.Sync, model: nn.Module, batches: Sequence[Batch]) -> Iterator[int]:
    """Run the backwards of every window; yield its number, so that the caller can use the gradient."""
    for number, window in enumerate(sync.windows(batches)):
        for data in window:
            sync.backward(loss_of(model, data), count=3)
        yield number


def train_a_window(sync: pe.Sync, model: nn.Module) -> None:
    """Train one window of this rank's first three batches."""
    for _ in windows_of(sync, model, own_batches(3)):
        sync.unscale_()


def right_window() -> dict[str, Tensor | None]:
    """Return the mean gradient of the window in `train_a_window`."""
    _, world = me()
    return right_grads(all_batches([3] * world), 9 * world)


def assert_trains_a_window(sync: pe.Sync, model: nn.Module) -> None:
    """Train a window, and check its gradient."""
    model.zero_grad()
    train_a_window(sync, model)
    assert_same(whole_grads(model), right_window())
