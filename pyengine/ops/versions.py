"""The public plan and exact sum: autograd sees what they write.

The core writes by address, which changes no version counter: autograd would not notice that a tensor saved
for backward was overwritten, and the engine would not notice a write to a gradient. The engine's own plans
write to its own memory, and do without the cost (0.1 µs a tensor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.ops import exact, plan
from pyengine.ops.pointers import Pointers, TensorList


def _increment_versions(*written: Tensor | TensorList | Pointers | None) -> None:
    """Count a write to each of these tensors, as PyTorch's own in-place ops do.

    Args:
        written: tensors, or lists of them, which may hold None.
    """
    tensors: list[Tensor] = []
    for item in written:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif item is not None:
            entries = item.tensors if isinstance(item, Pointers) else item
            tensors += [tensor for tensor in entries if tensor is not None]
    torch.autograd.graph.increment_version(tensors)


class BucketPlan(plan.BucketPlan):
    __doc__ = plan.BucketPlan.__doc__

    def pack_(
        self,
        flat: Tensor,
        tensors: TensorList | Pointers,
        scale: Tensor,
        *,
        only_if: Tensor | None = None,
    ) -> None:
        super().pack_(flat, tensors, scale, only_if=only_if)
        _increment_versions(flat)

    def unpack_(
        self,
        tensors: TensorList | Pointers,
        flat: Tensor,
        scale: Tensor,
        *,
        only_if: Tensor | None = None,
    ) -> None:
        super().unpack_(tensors, flat, scale, only_if=only_if)
        _increment_versions(tensors)

    def accumulate_(
        self, acc: Tensor, grads: TensorList | Pointers, scale: Tensor, *, first: bool, nonfinite: Tensor
    ) -> None:
        super().accumulate_(acc, grads, scale, first=first, nonfinite=nonfinite)
        _increment_versions(acc, nonfinite)

    def accumulate_cast_(
        self,
        wire: Tensor,
        acc: Tensor,
        grads: TensorList | Pointers,
        grad_scale: Tensor,
        wire_scale: Tensor,
        *,
        first: bool,
        nonfinite: Tensor,
    ) -> None:
        super().accumulate_cast_(wire, acc, grads, grad_scale, wire_scale, first=first, nonfinite=nonfinite)
        _increment_versions(wire, nonfinite)

    def unscale_norm(
        self,
        tensors: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        *,
        sumsq: Tensor,
        nonfinite: Tensor,
    ) -> None:
        super().unscale_norm(tensors, out, scale, sumsq=sumsq, nonfinite=nonfinite)
        _increment_versions(out, sumsq, nonfinite)


class ExactSum(exact.ExactSum):
    __doc__ = exact.ExactSum.__doc__

    def deposit_(self, tensors: TensorList | Pointers, *, first: bool, nonfinite: Tensor) -> None:
        super().deposit_(tensors, first=first, nonfinite=nonfinite)
        _increment_versions(self.limbs, self.bins, nonfinite)

    def align_(self, bins: Tensor) -> None:
        super().align_(bins)
        _increment_versions(self.limbs, self.bins)

    def round_(self, out: Tensor) -> None:
        super().round_(out)
        _increment_versions(out)
