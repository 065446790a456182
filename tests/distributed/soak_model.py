"""The model of a soak test, whose gradients are sums of small integers, whatever its parameters are.

A window therefore has one right answer, bit for bit; the learning rate is a power of two, so a step also has
one. This file also contains the ways to run backwards, and the reference in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from soak_plan import Item, Made
from torch import Tensor, nn

import pyengine as pe

LEARNING_RATE = 2.0**-6


class Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        raise ctx.error("in the backward")


class Unit(nn.Module):
    """Two parameters of the same shape, whose gradients are `x.sum(0)` and `2 * x.sum(0)`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones(shape, dtype=dtype))

    def forward(self, total: Tensor, x: Tensor, *, uses: bool) -> Tensor:
        """Add the parameters' terms to a 0-dim total; that of the second parameter only if `uses` is set."""
        x = x.unflatten(1, self.weight.shape or (1,)).to(self.weight.dtype)
        x = x if self.weight.dim() else x.squeeze(1)
        total = total + (self.weight * x).sum().float()
        return total + (self.sometimes * (2 * x)).sum().float() if uses else total


class Model(nn.Module):
    """Several units; `trap(index, total)` runs after each unit."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        first = len(made.shapes) - made.num_experts
        self.dense = nn.ModuleList([Unit(shape, made.dtype) for shape in made.shapes[:first]])
        self.experts = nn.ModuleList([Unit(shape, made.dtype) for shape in made.shapes[first:]])
        self._sizes = made.sizes
        self.trap: Callable[[int, Tensor], Tensor] = no_trap

    @property
    def units(self) -> list[Unit]:
        return [*self.dense, *self.experts]

    def forward(self, x: Tensor, uses: Sequence[bool]) -> Tensor:
        """Return a 0-dim loss, summed over items."""
        total = torch.zeros(())
        parts = x.split(self._sizes, dim=1)
        for index, (unit, part, used) in enumerate(zip(self.units, parts, uses, strict=True)):
            total = self.trap(index, unit(total, part, uses=used))
        return total


def no_trap(index: int, total: Tensor) -> Tensor:
    """Return the total unchanged."""
    return total


class Reference:
    """Training in one process, which sees the micro-batches of all ranks."""

    def __init__(self, made: Made, sharers: Sequence[int]) -> None:
        self._made, self._sharers = made, sharers
        self._model = Model(made)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, fused=made.is_fused)

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._model.named_parameters()}

    def sums(self, items: Sequence[tuple[int, Item]]) -> dict[str, Tensor | None]:
        """Return the exact float64 sums of gradients over `(rank, micro-batch)` pairs."""
        found: dict[str, Tensor | None] = {name: None for name, _ in self._model.named_parameters()}
        first = len(self._made.shapes) - self._made.num_experts
        for index, shape in enumerate(self._made.shapes):
            offset, size = sum(self._made.sizes[:index]), self._made.sizes[index]
            name = f"dense.{index}" if index < first else f"experts.{index - first}"
            seen = [item for rank, item in items if index < first or rank in self._sharers]
            for part, factor in (("weight", 1), ("sometimes", 2)):
                used = [item.x for item in seen if part == "weight" or item.uses[index]]
                if used:
                    rows = torch.cat(used)[:, offset : offset + size].double()
                    found[f"{name}.{part}"] = factor * rows.sum(0).reshape(shape)
        return found

    def means(self, sums: dict[str, Tensor | None], count: float) -> dict[str, Tensor | None]:
        """Return the sums times float32(1 / count), in float32, rounded to the parameters' dtype."""
        inverse = torch.tensor(1.0 / count, dtype=torch.float64).float()
        return {
            name: None if value is None else (value.float() * inverse).to(self._made.dtype)
            for name, value in sums.items()
        }

    def step(self, sums: dict[str, Tensor | None], count: float) -> None:
        grads = self.means(sums, count)
        for name, param in self._model.named_parameters():
            param.grad = grads[name]
        self._optimizer.step()


def _backward(sync: pe.Sync, loss: Tensor, count: int) -> None:
    sync.backward(loss, count=count)


def _block(sync: pe.Sync, loss: Tensor, count: int) -> None:
    with sync.micro_batch() as mb:
        loss.backward()
        mb.count, mb.loss = count, loss


def _two(sync: pe.Sync, loss: Tensor, count: int) -> None:
    with sync.micro_batch(count=count):
        (3 * loss).backward(retain_graph=True)
        (-2 * loss).backward()


def _two_marked(sync: pe.Sync, loss: Tensor, count: int) -> None:
    with sync.micro_batch(count=count) as mb:
        (3 * loss).backward(retain_graph=True)
        rest = -2 * loss
        with mb.last_backward(rest):
            rest.backward()


def _silent(sync: pe.Sync, loss: Tensor, count: int) -> None:
    with sync.micro_batch(count=count):
        pass


BACKWARDS = {
    "backward": _backward,
    "block": _block,
    "two": _two,
    "two, marked": _two_marked,
    "silent": _silent,
}
