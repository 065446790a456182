"""Losses that are means over tokens, prompts or several things at once, and their values in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
LENGTH = 6


class Heads(nn.Module):
    """A model with two losses per token, and a penalty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.body = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.ce = nn.Parameter(torch.randn(3, generator=generator).to(dtype))
        self.mtp = nn.Parameter(torch.randn(3, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return two losses per token, each `[sequences, LENGTH]`, and a 0-dim penalty."""
        hidden = (x.to(self.body.dtype) @ self.body).tanh()
        return (hidden @ self.ce).square(), (hidden @ self.mtp).square(), hidden.square().mean()


def micro_batch(seed: int) -> Batch:
    """Return one to three sequences of unequal lengths.

    Every third micro-batch has no tokens for the second head, and every fifth has no tokens at all.
    """
    generator = torch.Generator().manual_seed(seed)
    num = 1 + seed % 3
    lengths = torch.randint(1, LENGTH + 1, (num, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths) & torch.tensor(seed % 5 != 2)
    return {
        "x": torch.randn(num, LENGTH, 4, generator=generator),
        "mask": mask,
        "mtp_mask": mask & (torch.arange(LENGTH) % 2 == 1) & torch.tensor(seed % 3 != 1),
        "begins": torch.tensor(float(seed % 100 % 3 == 0)),  # a prompt begins in every third one
    }


@dataclass(frozen=True)
class Recipe:
    """A kind of loss.

    Attributes:
        count: returns the count of a micro-batch, for `windows`.
        losses: returns the losses of a micro-batch, for `backward`.
        whole: returns the loss of all micro-batches of a window, 0-dim.
    """

    count: Callable[[Batch], Any]
    losses: Callable[[nn.Module, Batch], Any]
    whole: Callable[[nn.Module, Sequence[Batch]], Tensor]


def _token_sum(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"])[0] * batch["mask"]).sum()


def _total(batches: Sequence[Batch], name: str) -> int:
    return sum(int(batch[name].sum()) for batch in batches)


def _mean(model: nn.Module, batches: Sequence[Batch], head: int, mask: str) -> Tensor:
    terms = [(model(batch["x"])[head] * batch[mask]).sum() for batch in batches]
    return torch.stack(terms).sum() / max(1, _total(batches, mask))


def _mean_of_prompts(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    sums = [_token_sum(model, batch) for batch in batches]
    return torch.stack(sums).sum() / max(1, _total(batches, "begins"))


def _several(model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
    ce, mtp, aux = model(batch["x"])
    has_mtp = bool(batch["mtp_mask"].any())
    return {
        "aux": 0.25 * aux,  # not in the order of the counts
        "ce": (ce * batch["mask"]).sum(),
        "mtp": 0.5 * (mtp * batch["mtp_mask"]).sum() if has_mtp else 0,
    }


def _whole_several(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    aux = torch.stack([model(batch["x"])[2] for batch in batches]).mean()
    ce, mtp = _mean(model, batches, 0, "mask"), _mean(model, batches, 1, "mtp_mask")
    return ce + 0.5 * mtp + 0.25 * aux


RECIPES = {
    "token mean": Recipe(
        lambda batch: batch["mask"].sum(),
        _token_sum,
        lambda model, batches: _mean(model, batches, 0, "mask"),
    ),
    # No prompt begins in most micro-batches: their counts are 0, but their losses are not.
    "prompt mean": Recipe(lambda batch: batch["begins"], _token_sum, _mean_of_prompts),
    "several heads": Recipe(
        lambda batch: {"ce": batch["mask"].sum(), "mtp": int(batch["mtp_mask"].sum()), "aux": 1},
        _several,
        _whole_several,
    ),
}


def gradient_of(recipe: Recipe, model: Heads, batches: Sequence[Batch]) -> tuple[float, list[Tensor]]:
    """Return a window's loss and its gradient by parameter, from one float64 backward."""
    twin = Heads(torch.float64)
    twin.load_state_dict(model.state_dict())
    loss = recipe.whole(twin, batches)
    loss.backward()
    return loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
