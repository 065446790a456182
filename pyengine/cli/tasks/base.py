"""The interface of a task: a model, its data on each rank, and a summed loss with an item count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

MODELS = ("gpt", "cnn")

IGNORED = -100  # target of ignored items: the default `ignore_index` of `cross_entropy`

Batch = tuple[Tensor, Tensor]


def make_optimizer(
    model: nn.Module, lr: float, *, steps: int, warm_up_steps: float
) -> tuple[Optimizer, LambdaLR]:
    """Return a fused AdamW, and a schedule: a warm-up times a linear decrease to a tenth of `lr`."""
    optimizer = AdamW(model.parameters(), lr=lr, fused=True)
    return optimizer, LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up_steps) * (1 - 0.9 * step / steps)
    )


class Task(Protocol):
    """A model with its data."""

    name: str  # The name on the command line.
    unit: str  # Unit of counts: "tokens" or "images".
    num_samples: int  # Number of samples that `batch` indexes.

    def build(self) -> nn.Module:
        """Return a new fp32 model."""

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of the samples whose indices are in `rows` (int64 `[micro_batch]`)."""

    def batches(self, *, rank: int, world_size: int, micro_batch: int, seed: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches indefinitely; equal arguments give equal micro-batches."""

    def short(self, batch: Batch, rank: int) -> Batch:
        """Shorten a micro-batch by a different number of items on each rank, as at the end of a dataset."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the sum of the loss over the items of the micro-batch, and the number of items."""
        x, y = batch
        logits = model(x).flatten(0, -2)
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits
        return cross_entropy(logits, y.flatten(), reduction="sum"), int((y != IGNORED).sum())

    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return metrics on held-out data, by name."""
