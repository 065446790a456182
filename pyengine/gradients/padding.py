"""Micro-batches that a rank runs only because the forwards of other ranks are collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge


class Padding(ABC):
    """Lets a micro-batch of padding leave no trace in gradients and buffers."""

    @abstractmethod
    def begin(self) -> None:
        """Discard the gradients of the current micro-batch, and its writes to buffers: it is padding."""

    @abstractmethod
    def preserve_grads(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Keep a backward of padding, from `roots` where these are known, from changing any `.grad`.

        This includes leaves of the caller: parameters that the engine does not have, and the leaves behind
        `roots`.
        """
