"""Micro-batches that a rank runs only because other ranks' forwards launch collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge


class Padding(ABC):
    """Ensures that padding micro-batches do not change gradients or buffers."""

    @abstractmethod
    def begin(self) -> None:
        """Mark the current micro-batch as padding: discard its gradients and its writes to buffers."""

    @abstractmethod
    def preserve_grads(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Prevent a padding backward, from `roots` if they are known, from changing any `.grad`.

        The `.grad` of parameters that the engine does not manage, and of other leaves of the graphs of
        `roots`, is preserved, too.
        """
