"""The sums of a window, wherever its gradients lie: flat buffers over a plan's slots, without `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


class WindowSum(Protocol):
    """A sum over a plan's slots, in memory that it owns as long as it lives: `Fp32Sum`, `ExactOverRanks`."""

    def begin(self) -> None:
        """Start a window: nothing of it has been deposited."""

    def resume(self) -> None:
        """Start with a sum of zero that goes on from another one: what `parts` returns will be written to."""

    def over(self, plan: BucketPlan) -> WindowSum:
        """Return the same sum, in the same memory, for gradients of some of its slots, which `plan` names."""

    def parts(self, offset: int, numel: int) -> dict[str, Tensor]:
        """Return one slot's sum, by name, as a checkpoint holds it (see `Saved`); behind `resume` its memory.

        Args:
            offset, numel: of the slot.
        """

    def scalars(self) -> list[Tensor]:
        """Return what `deposit_` reads besides gradients and sum."""

    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        """Add a micro-batch's gradients, one a slot.

        Args:
            grads: one entry a slot, `[slot.numel]`, read; None adds nothing.
            first: True overwrites: the sum holds nothing of this window yet.
            nonfinite: uint8 `[slots]`, OR-ed with 1 where a gradient was not finite, or too large for an
                exact sum (2^126).

        Cost: reads a gradient, writes an element of the sum, and reads one unless `first`.
        """


class Fp32Sum:
    """Narrow gradients summed in float32: nothing stops growing after 256 micro-batches.

    Gradients are bfloat16 or float16; `deposit_` moves 10 bytes an element, or 6 if `first`.

    Args:
        plan: slots of the buffer.
        flat: the buffer, float32 `[numel]`; owned by this object from now on.

    Attributes:
        flat: as given.
    """

    def __init__(self, plan: BucketPlan, flat: Tensor) -> None:
        self._plan, self.flat = plan, flat
        self._one = torch.ones((), dtype=torch.float32, device=flat.device)

    def begin(self) -> None:
        return

    def resume(self) -> None:
        return

    def over(self, plan: BucketPlan) -> Fp32Sum:
        other = copy(self)
        other._plan = plan
        return other

    def parts(self, offset: int, numel: int) -> dict[str, Tensor]:
        return {"sum": self.flat[offset : offset + numel]}

    def scalars(self) -> list[Tensor]:
        return [self._one]

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
        """Write (sum + gradients) times `scale` into a wire buffer.

        Args:
            wire: of the wire's type, `[numel]`, written; may be `flat` itself.
            grads, first: as for `deposit_`.
            scale: float32, 0-dim; None for 1.
            nonfinite: uint8 `[slots]`, OR-ed with 1 where a value on the wire is not finite; where that is
                `flat` itself, unscaled, where a gradient is not.

        Cost: one pass; reads 4 bytes (0 if `first`) and a gradient, writes one wire element.
        """
        if wire is self.flat and scale is None:
            self.deposit_(grads, first=first, nonfinite=nonfinite)
        else:
            scale = self._one if scale is None else scale
            self._plan.accumulate_cast_(
                wire, self.flat, grads, self._one, scale, first=first, nonfinite=nonfinite
            )


class SlotNorms:
    """One read of reduced gradients: their norm and finite flags.

    Args:
        plan: their slots.
        params: indices of the slots' parameters, in the order of registration.
        device: where they lie.

    Attributes:
        params: int64 `[slots]`, as given.
    """

    def __init__(self, plan: BucketPlan, params: Sequence[int], device: torch.device) -> None:
        self._plan = plan
        self.params = torch.tensor(params, dtype=torch.int64, device=device)
        self._sumsq = torch.zeros(len(params), dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(len(params), dtype=torch.uint8, device=device)

    def read(
        self,
        sources: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        final: FinalPass,
    ) -> None:
        """Read the slots once, times `scale`; leave norm and finite flags in `final`.

        Args:
            sources: one entry a slot, `[slot.numel]`, read.
            out: written, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.
            final: its `sumsq` and `nonfinite` are written at `params`.

        Cost: reads one element; writes one if `out` is given.
        """
        self._plan.unscale_norm(sources, out, scale, sumsq=self._sumsq, nonfinite=self._nonfinite.zero_())
        final.sumsq.index_copy_(0, self.params, self._sumsq)
        final.nonfinite.index_copy_(0, self.params, self._nonfinite)

    def scale_(self, tensors: TensorList | Pointers, scale: Tensor) -> None:
        """Multiply the slots in place by `scale`, float32, 0-dim: reads and writes one element each."""
        self._plan.unscale_norm(tensors, tensors, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)

    def flags(self, sources: TensorList | Pointers, one: Tensor) -> Tensor:
        """Return which slots are not finite, uint8 `[slots]`, the caller's.

        Args:
            sources: as for `read`.
            one: float32, 0-dim, 1.

        Cost: reads one element.
        """
        flags = torch.zeros_like(self._nonfinite)
        self._plan.unscale_norm(sources, None, one, sumsq=self._sumsq, nonfinite=flags)
        return flags
