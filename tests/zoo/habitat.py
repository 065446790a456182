"""What the bugs of the zoo share: a small model, losses, data by rank, and the right results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Watch = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """The numbers that a bug produces, and what they should be."""

    got: Tensor
    due: Tensor


class Net(nn.Module):
    """A trunk, two heads and an expert, for inputs of size 6."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.expert = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.head2 = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.losses(x).sum()

    def losses(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        h = h + torch.tanh(self.expert(h))
        return torch.stack([self.head(h).square().sum(), self.head2(h).exp().sum()])


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(rank: int, sizes: Iterable[int]) -> list[Tensor]:
    """Return a rank's micro-batches of these sizes, float32 `[size, 6]`."""
    made = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(size, 6, generator=made) + rank for size in sizes]


def mine(*sizes: int) -> list[Tensor]:
    """Return this rank's micro-batches."""
    return data(dist.get_rank(), sizes)


def everybody(*sizes: int) -> list[Tensor]:
    """Return the micro-batches of all ranks."""
    return [x for rank in range(dist.get_world_size()) for x in data(rank, sizes)]


def flat(model: nn.Module, what: str = "grad") -> Tensor:
    tensors = [p.grad if what == "grad" else p for p in model.parameters()]
    return torch.cat([torch.zeros(1) if t is None else t.detach().flatten().clone() for t in tensors])


def right(model: nn.Module, losses: Iterable[Callable[[nn.Module], Tensor]], divisor: float) -> Tensor:
    """Return the gradient of a sum of losses over a divisor, computed in one process."""
    twin = copy.deepcopy(model)
    for loss in losses:
        (loss(twin) / divisor).backward()
    return flat(twin)


def right_mean(model: nn.Module, *sizes: int) -> Tensor:
    """Return the gradient of the mean over ranks and micro-batches of the summed losses."""
    xs = everybody(*sizes)
    return right(model, [lambda twin, x=x: twin(x) for x in xs], len(xs))


def average_(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def end_window(audit: Any, model: nn.Module, optimizer: torch.optim.Optimizer, due: Tensor) -> Outcome:
    """Step with the current gradients; return them with the right ones."""
    audit.reduced()
    got = flat(model)
    optimizer.step()
    return Outcome(got, due)


def compare_with_rank_0(model: nn.Module) -> Outcome:
    """Return this rank's parameters with those of rank 0."""
    got = flat(model, "value")
    due = got.clone()
    dist.broadcast(due, 0)
    return Outcome(got, due)
