"""What a task is to the training loop: a model, its data cut by rank,
and a loss that is a sum with its count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

MODELS = ("gpt", "cnn")

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """A model with its data.

    Attributes:
        name: as on the command line.
        unit: what is counted: "tokens" or "images".
        num_samples: what `batch` can choose from.
    """

    name: str
    unit: str
    num_samples: int

    def build(self) -> nn.Module:
        """Return a freshly initialised model, fp32."""

    def batch(self, rows: Tensor) -> Batch:
        """Return a micro-batch of chosen samples, int64 `[micro_batch]`."""

    def batches(self, *, rank: int, world_size: int, micro_batch: int, seed: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches without end; the same for the same arguments,
        on every machine and rank.
        """

    def short(self, batch: Batch, rank: int) -> Batch:
        """Cut a micro-batch to fewer items, another number on every rank: the uneven end of a data set."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss summed over the micro-batch's items, and their number."""

    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return what the trained model is worth on data it has not seen, by name."""
