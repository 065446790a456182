"""Padding: micro-batches without data that a rank runs because a forward launches collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge


class Padding(ABC):
    """Prevents padding micro-batches from changing gradients or buffers."""

    @abstractmethod
    def begin(self) -> None:
        """Mark the current micro-batch as padding: discard its gradients and its writes to buffers."""

    @abstractmethod
    def preserve_grads(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Prevent a padding backward, from `roots` if they are known, from changing any `.grad`.

        Also preserves `.grad` of parameters that the engine does not reduce, and of other leaves of the
        graphs of `roots`.
        """
