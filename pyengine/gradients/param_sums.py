"""Sums of gradients that somebody else lays out, parameter by parameter: DDP's buckets, FSDP2's units."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.gradients.flag_rows import FlagRows
from pyengine.gradients.layout import ALIGN_ELEMENTS
from pyengine.gradients.sums import WindowSum
from pyengine.ops.exact_reference import BLOCK
from pyengine.ops.plan import BucketPlan


class ParamSum:
    """The sum of the gradients of parameters that travel together: a bucket of DDP's, a unit of FSDP2's.

    Args:
        params: theirs, in the owner's order.
        plan: where they lie in the sum.
        total: the sum, over that plan.

    Attributes:
        params, device: as given, and where they lie.
        flagged: for each micro-batch of this window uint8 `[params]`, 1 where a gradient was not finite.
        is_filled: whether something of this window is in it.
    """

    def __init__(self, params: Sequence[Any], plan: BucketPlan, total: WindowSum) -> None:
        self.params = list(params)
        self._plan, self._total = plan, total
        self.device = self.params[0].device
        self._flag_rows = FlagRows(len(self.params), self.device)
        self.begin()

    def begin(self) -> None:
        """Start a window: the first gradients overwrite."""
        self._total.begin()
        self._flag_rows.begin()
        self.is_filled = False
        self.flagged: list[Tensor] = []

    def resume(self) -> None:
        """Start a window that goes on from another sum, which is to be written to `parts`."""
        self._total.resume()
        self.is_filled = True

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Accumulate a micro-batch.

        Args:
            grads: one entry a parameter, `[numel]`, read; None adds nothing.

        Cost: as `deposit_` of the sum.
        """
        self._total.deposit_(grads, first=not self.is_filled, nonfinite=self.new_flags())
        self.is_filled = True

    def new_flags(self) -> Tensor:
        """Begin a micro-batch: return its flags, uint8 `[params]`, all zero; this object's."""
        self.flagged.append(self._flag_rows.take())
        return self.flagged[-1]

    def parts(self, index: int) -> dict[str, Tensor]:
        """Return one parameter's sum, by name, to be moved or saved; behind `resume` its memory."""
        return self._total.parts(self._plan.offsets[index], self._plan.numels[index])


class ExactParamSum(ParamSum):
    """Gradients of any type summed exactly: every parameter in blocks of its own, 8.02 bytes an element.

    Args:
        params: as for `ParamSum`; at least one.
        terms: of a full window.
        comm: by which the sum travels.
        num_flags: flags that travel with the first round.
    """

    def __init__(self, params: Sequence[Any], *, terms: Terms, comm: Comm, num_flags: int = 0) -> None:
        numels = [param.numel() for param in params]
        *offsets, end = itertools.accumulate([-(-n // BLOCK) * BLOCK for n in numels], initial=0)
        plan, device = BucketPlan(offsets, numels), params[0].device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._exact = exact_over_ranks(
            plan, numel=max(BLOCK, end), terms=terms, device=device, comm=comm, num_flags=num_flags
        )
        super().__init__(params, plan, self._exact)


def packed(numels: Sequence[int]) -> BucketPlan:
    """Return the plan of slots one after the other, as DDP lays them out."""
    return BucketPlan(list(itertools.accumulate(numels, initial=0))[:-1], numels)


def aligned(numels: Sequence[int]) -> BucketPlan:
    """Return the plan of slots that begin at multiples of `ALIGN_ELEMENTS`."""
    sizes = [-(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for numel in numels]
    return BucketPlan(list(itertools.accumulate(sizes, initial=0))[:-1], numels)
