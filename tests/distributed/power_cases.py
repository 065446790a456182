"""PowerSGD in float64, and models whose gradients are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pyengine as pe

SHAPES = {"wide": (12, 40), "bias": (12,), "small": (3, 4), "conv": (16, 3, 5, 5), "tall": (33, 9)}


class Told(nn.Module):
    """Its gradients are numbers of a rank's own, other ones in every window."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            param = nn.Parameter(torch.zeros(shape))
            if name == "conv":
                param = nn.Parameter(torch.zeros(shape).contiguous(memory_format=torch.channels_last))
            self.register_parameter(name, param)
        self.rank = rank

    def forward(self, window: int) -> Tensor:
        # Backwards, so that gradients come in the order of registration: that of DDP's first buckets.
        targets = gradients(self.rank, window)
        return sum((getattr(self, name) * targets[name]).sum() for name in [*SHAPES][::-1])


def gradients(rank: int, window: int) -> dict[str, Tensor]:
    """Return a rank's gradients: some directions that stay, and noise."""
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        stays = torch.Generator().manual_seed(index)
        rows, columns = shape[0], max(1, torch.Size(shape[1:]).numel())
        left = torch.randn(rows, 2, generator=stays)
        right = torch.randn(columns, 2, generator=stays)
        fresh = torch.Generator().manual_seed(1000 * window + 10 * rank + index)
        noise = 0.3 * torch.randn(rows, columns, generator=fresh)
        found[name] = ((left * (1 + rank)) @ right.t() + noise).view(shape)
    return found


def as_matrix(name: str, value: Tensor) -> Tensor:
    """Return a parameter's values as a matrix of its rows, in the order in which they are stored."""
    if name == "conv":
        value = value.permute(0, 2, 3, 1)
    return value.reshape(value.shape[0], -1)


def is_sent_thin(name: str, rank: int, min_ratio: float = 2.0) -> bool:
    """Whether a parameter travels as a product."""
    if len(SHAPES[name]) < 2:
        return False
    rows, columns = as_matrix(name, torch.zeros(SHAPES[name])).shape
    return rows * columns >= min_ratio * rank * (rows + columns)


class Reference:
    """The algorithm over all ranks, in float64, with torch's own QR.

    Args:
        world_size: ranks.
        rank: of the approximation.

    Attributes:
        lost: by rank and parameter, the residuals.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self._rank, self._directions = rank, {}
        self.lost: list[dict[str, Tensor]] = [{} for _ in range(world_size)]

    def sum(self, terms: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what arrives of one window's terms, one a rank, as matrices."""
        found = {}
        for name in SHAPES:
            mine = [as_matrix(name, term[name].double()) for term in terms]
            if not is_sent_thin(name, self._rank):
                found[name] = sum(mine)
                continue
            mine = [m + kept.get(name, 0) for m, kept in zip(mine, self.lost, strict=True)]
            if name not in self._directions:
                generator = torch.Generator().manual_seed(0)
                shape = mine[0].shape[1], self._rank
                self._directions[name] = torch.randint(-(2**20), 2**20, shape, generator=generator).double()
            left, _ = torch.linalg.qr(sum(m @ self._directions[name] for m in mine))
            self._directions[name] = sum(m.t() @ left for m in mine)
            found[name] = left @ self._directions[name].t()
            for m, kept in zip(mine, self.lost, strict=True):
                kept[name] = m - left @ (left.t() @ m)
        return found


def train(sync: pe.Sync, forward: nn.Module, model: nn.Module, windows: Sequence[Any]) -> list[Any]:
    """Train windows of one micro-batch; return their mean gradients."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    for window in sync.windows(windows):
        for number in window:
            sync.backward(forward(number))
        sync.step(optimizer)
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.zero_grad()
    return found
