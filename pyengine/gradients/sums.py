"""Sums over the micro-batches of a window, in flat buffers.

A `Bucket` has one sum. To add a new kind of sum, define a class here or in a separate file such as
exact_sums.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Any

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList


class Sum(ABC):
    """A sum over the slots of a plan, in memory that this object owns."""

    def begin(self) -> None:
        """Start a window; its sum has no gradients yet."""

    @abstractmethod
    def over(self, plan: BucketPlan) -> Any:
        """Return this sum, restricted to the slots of `plan`, in the same memory."""

    def scalars(self) -> list[Tensor]:
        """Return the tensors that `deposit_` reads in addition to the gradients and the sum."""
        return []

    @abstractmethod
    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        """Add the gradients of a micro-batch, one of shape `[slot.numel]` per slot; None adds nothing.

        Args:
            first: whether these are the first gradients of the window, which overwrite the sum.
            nonfinite: uint8 `[slots]`, OR-ed with 1 for each slot whose gradient is not finite, or is too
                large for an exact sum (2^126 or more).
        """


class FlatSum(Sum):
    """A sum in one flat buffer of shape `[numel]`; this object takes ownership of the buffer."""

    def __init__(self, plan: BucketPlan, flat: Tensor) -> None:
        self._plan, self.flat = plan, flat
        self._one = torch.ones((), dtype=torch.float32, device=flat.device)

    def over(self, plan: BucketPlan) -> Any:
        other = copy(self)
        other._plan = plan  # noqa: SLF001 - a copy of this object
        return other

    def scalars(self) -> list[Tensor]:
        return [self._one]

    def deposit_into_wire_(
        self,
        wire: Tensor,
        grads: TensorList | Pointers,
        scale: Tensor | None,
        *,
        first: bool,
        nonfinite: Tensor,
    ) -> None:
        """Write the sum including the gradients, multiplied by `scale`, to a communication buffer.

        Args:
            wire: buffer in the communication dtype, `[numel]`; may be `flat` itself.
            grads, first: see `deposit_`.
            scale: float32, 0-dim; None for 1.
            nonfinite: see `deposit_`; a subclass may also flag values that overflow in the communication
                dtype.
        """
        self.deposit_(grads, first=first, nonfinite=nonfinite)
        if wire is not self.flat or scale is not None:
            wire.copy_(self.flat if scale is None else self.flat * scale)


class InPlaceSum(FlatSum):
    """The buffer that backs `.grad`; autograd adds to the buffer from the second micro-batch on.

    `deposit_` writes the first gradients, which have the dtype of the buffer and are not checked.
    """

    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        del nonfinite
        assert first
        self._plan.pack_(self.flat, grads, self._one)


class Fp32Sum(FlatSum):
    """bf16 or fp16 gradients summed in float32; a sum in bf16 would stop growing after 256 equal terms.

    `deposit_` moves 10 bytes per element, or 6 if `first`; `deposit_into_wire_` needs a single pass.
    """

    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        self._plan.accumulate_(self.flat, grads, self._one, first=first, nonfinite=nonfinite)

    def deposit_into_wire_(
        self,
        wire: Tensor,
        grads: TensorList | Pointers,
        scale: Tensor | None,
        *,
        first: bool,
        nonfinite: Tensor,
    ) -> None:
        if wire is self.flat and scale is None:
            self.deposit_(grads, first=first, nonfinite=nonfinite)
        else:
            scale = self._one if scale is None else scale
            self._plan.accumulate_cast_(
                wire, self.flat, grads, self._one, scale, first=first, nonfinite=nonfinite
            )


# The class that sums bf16 and fp16 gradients, by the dtype of the buffer.
FLAT_SUMS: dict[torch.dtype, type[FlatSum]] = {torch.float32: Fp32Sum}
