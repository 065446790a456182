"""Padding: micro-batches without data, which a rank runs because every forward launches collectives."""

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
        """Prevent a padding backward from changing any `.grad`.

        This includes the `.grad` of parameters that the engine does not reduce, and of other leaves of the
        graphs of `roots`. `roots` are the tensors or graph edges from which the backward starts; if they are
        unknown, `roots` is empty, and other leaves are not preserved.
        """
