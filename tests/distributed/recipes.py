"""Losses that are means over tokens, over prompts, or over several things at once, with what each of them is
in float64 over a whole window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
LENGTH = 6


class Heads(nn.Module):
    """Two numbers a token, and a penalty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.body = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.ce = nn.Parameter(torch.randn(3, generator=generator).to(dtype))
        self.mtp = nn.Parameter(torch.randn(3, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of tokens, `[sequences, LENGTH]` of the same twice, and a 0-dim penalty."""
        hidden = (x.to(self.body.dtype) @ self.body).tanh()
        return (hidden @ self.ce).square(), (hidden @ self.mtp).square(), hidden.square().mean()


def _prompt(seed: int) -> int:
    """Return whose sequences a micro-batch has: three neighbours of a rank share a prompt."""
    return seed // 100 * 34 + seed % 100 // 3


def micro_batch(seed: int) -> Batch:
    """Return one to three sequences of unequal lengths; a third of the micro-batches has no second head's
    tokens, and every fifth no token at all.
    """
    generator = torch.Generator().manual_seed(seed)
    num = 1 + seed % 3
    lengths = torch.randint(1, LENGTH + 1, (num, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths) & torch.tensor(seed % 5 != 2)
    return {
        "x": torch.randn(num, LENGTH, 4, generator=generator),
        "mask": mask,
        "mtp_mask": mask & (torch.arange(LENGTH) % 2 == 1) & torch.tensor(seed % 3 != 1),
        "prompt": torch.full((num,), _prompt(seed)),
        "begins": torch.tensor(float(_prompt(seed) != _prompt(seed - 1))),
    }


@dataclass(frozen=True)
class Recipe:
    """A loss.

    Attributes:
        count: of a micro-batch, for `windows`.
        losses: of a micro-batch, for `backward`.
        whole: the loss of a window's micro-batches together, 0-dim.
    """

    count: Callable[[Batch], Any]
    losses: Callable[[nn.Module, Batch], Any]
    whole: Callable[[nn.Module, Sequence[Batch]], Tensor]


def _sums(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over each sequence's tokens."""
    return (model(batch["x"])[0] * batch["mask"]).sum(1)


def _total(batches: Sequence[Batch], name: str) -> int:
    return sum(int(batch[name].sum()) for batch in batches)


def _mean(model: nn.Module, batches: Sequence[Batch], head: int, mask: str) -> Tensor:
    terms = [(model(batch["x"])[head] * batch[mask]).sum() for batch in batches]
    return torch.stack(terms).sum() / max(1, _total(batches, mask))


TOKEN_MEAN = Recipe(
    lambda batch: batch["mask"].sum(),
    lambda model, batch: (model(batch["x"])[0] * batch["mask"]).sum(),
    lambda model, batches: _mean(model, batches, 0, "mask"),
)


def _prompt_lengths() -> Tensor:
    """Return by prompt its tokens in all micro-batches, as a loader would bring them along."""
    lengths = torch.zeros(4 * 34, dtype=torch.long)
    for seed in range(400):
        lengths[_prompt(seed)] += micro_batch(seed)["mask"].sum()
    return lengths.clamp(min=1)


_LENGTHS = _prompt_lengths()


def _mean_of_prompt_means(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    prompts = sum(float(batch["begins"]) for batch in batches)
    sums = [(_sums(model, batch) / _LENGTHS[batch["prompt"]]).sum() for batch in batches]
    return torch.stack(sums).sum() / max(1.0, prompts)


PROMPT_MEAN = Recipe(
    # In most micro-batches no prompt begins: they count 0, and their losses are not.
    lambda batch: batch["begins"],
    lambda model, batch: (_sums(model, batch) / _LENGTHS[batch["prompt"]]).sum(),
    _mean_of_prompt_means,
)


def _several(model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
    ce, mtp, aux = model(batch["x"])
    has_mtp = bool(batch["mtp_mask"].any())
    return {
        "aux": 0.25 * aux,  # in another order than they are counted
        "ce": (ce * batch["mask"]).sum(),
        "mtp": 0.5 * (mtp * batch["mtp_mask"]).sum() if has_mtp else 0,
    }


def _whole_several(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    aux = torch.stack([model(batch["x"])[2] for batch in batches]).mean()
    ce, mtp = _mean(model, batches, 0, "mask"), _mean(model, batches, 1, "mtp_mask")
    return ce + 0.5 * mtp + 0.25 * aux


SEVERAL = Recipe(
    lambda batch: {"ce": batch["mask"].sum(), "mtp": int(batch["mtp_mask"].sum()), "aux": 1},
    _several,
    _whole_several,
)

RECIPES = {
    "token mean": TOKEN_MEAN,
    "prompt mean": PROMPT_MEAN,
    "several heads": SEVERAL,
}


def gradient_of(recipe: Recipe, model: Heads, batches: Sequence[Batch]) -> tuple[float, list[Tensor]]:
    """Return a window's loss and its gradient by parameter, computed at once in float64."""
    twin = Heads(torch.float64)
    twin.load_state_dict(model.state_dict())
    loss = recipe.whole(twin, batches)
    loss.backward()
    return loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
