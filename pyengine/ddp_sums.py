"""Sums beside DDP's buckets: what earlier micro-batches brought, until DDP hands out the last one's gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyengine._exact import ExactSum
from pyengine._exact_reference import BLOCK, POISONED
from pyengine._ops import BucketPlan
from pyengine.accumulator.base import Saved, slot_gradient
from pyengine.hook import Launched


class Beside(Protocol):
    """The sum of one DDP bucket.

    Attributes:
        params: DDP's, in its order.
        flagged: a flag a parameter and micro-batch of this window, 1 where it was not finite.
        is_filled: whether something of this window is in it.
    """

    params: list[Any]
    flagged: list[Tensor]
    is_filled: bool

    def begin(self) -> None:
        """Start a window: the first gradients overwrite."""

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add a micro-batch."""

    def new_flags(self) -> Tensor:
        """Begin a micro-batch: return its flags, all zero."""

    def parts(self, index: int) -> dict[str, Tensor]:
        """Return the memory of one parameter's sum, so that it can move or be saved."""


class Sums:
    """The sums of all of DDP's buckets, in DDP's own order.

    Args:
        ddp: the wrapped model.
        make: makes the sum of a bucket from its parameters.
        wants: whether buckets of a dtype have a sum here.

    Attributes:
        used: parameters that have brought something in this window.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        make: Callable[[Sequence[Any]], Beside],
        wants: Callable[[torch.dtype], bool],
    ) -> None:
        self._ddp, self._make, self._wants = ddp, make, wants
        self._sums: dict[int, Beside] = {}
        self._is_rebuilt = False
        self.used: set[Any] = set()

    def begin(self) -> None:
        """Start a window."""
        self.used = set()
        for total in self._sums.values():
            total.begin()

    def add(self) -> None:
        """Take in and release the gradients of an earlier micro-batch."""
        self.follow()
        for total in self._sums.values():
            total.add([slot_gradient(p) for p in total.params])
            self.used.update(param for param in total.params if param.grad is not None)
            for param in total.params:
                param.grad = None

    def follow(self) -> None:
        """Make the sums, or make them anew, if they are not those of DDP's present buckets."""
        if not self._sums or self._is_rebuilt != self._ddp._has_rebuilt_buckets:
            self.lay_out()

    def of(self, bucket: Any) -> Beside | None:
        """Return the sum of a bucket that DDP hands out."""
        return self._sums.get(bucket.index())

    def flagged(self) -> list[tuple[list[Any], list[Tensor]]]:
        """Return (parameters, flags a micro-batch) of every sum, for this window."""
        return [(total.params, total.flagged) for total in self._sums.values()]

    def save(self, names: Mapping[Any, str]) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing if there were none."""
        return {
            names[param]: {
                **{name: part.clone() for name, part in total.parts(index).items()},
                "nonfinite": flags,
            }
            for total in self._sums.values()
            if total.is_filled
            for index, (param, flags) in enumerate(
                zip(total.params, torch.stack(total.flagged, 1), strict=True)
            )
        }

    def load(self, saved: Saved, names: Mapping[Any, str], *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""
        self.follow()
        for total in self._sums.values():
            total.is_filled = True
            rows = torch.zeros(done, len(total.params), dtype=torch.uint8, device=total.params[0].device)
            for index, param in enumerate(total.params):
                kept = saved.get(names[param], {})
                for name, part in total.parts(index).items():
                    part.copy_(kept[name]) if kept else part.zero_()
                if kept:
                    rows[:, index] = kept["nonfinite"]
            total.flagged = [*rows]

    def lay_out(self) -> None:
        """Follow DDP's buckets, which it rebuilds once; what has been summed moves along."""
        old = {
            id(param): (total.parts(index), [flags[index] for flags in total.flagged])
            for total in self._sums.values()
            for index, param in enumerate(total.params)
        }
        was_filled = any(total.is_filled for total in self._sums.values())
        self._is_rebuilt = self._ddp._has_rebuilt_buckets
        self._sums = {
            bucket.index(): self._make(bucket.parameters())
            for bucket in self._ddp.reducer._get_zeros_like_grad_buckets()
            if self._wants(bucket.buffer().dtype)
        }
        for total in self._sums.values():
            total.is_filled = was_filled
            for index, param in enumerate(total.params):
                before, flags = old.get(id(param), ({}, []))
                for name, part in before.items():
                    total.parts(index)[name].copy_(part)
                while len(total.flagged) < len(flags):
                    total.new_flags()
                for row, flag in zip(total.flagged, flags, strict=False):
                    row[index] = flag


class _Base:
    def __init__(self, params: Sequence[Any]) -> None:
        self.params = list(params)
        self._numels = [p.numel() for p in self.params]
        self._device = self.params[0].device
        self._one = torch.ones((), device=self._device)
        self.begin()

    def begin(self) -> None:
        """Start a window: the first gradients overwrite."""
        self.is_filled = False
        self.flagged: list[Tensor] = []

    def new_flags(self) -> Tensor:
        """Begin a micro-batch: return its flags, all zero."""
        self.flagged.append(torch.zeros(len(self.params), dtype=torch.uint8, device=self._device))
        return self.flagged[-1]


class Fp32Beside(_Base):
    """Narrow gradients summed in fp32."""

    def __init__(self, params: Sequence[Any]) -> None:
        super().__init__(params)
        self._plan = packed(self._numels)
        self._flat = torch.zeros(sum(self._numels), device=self._device)
        self._views = list(self._flat.split(self._numels))

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add a micro-batch."""
        flags = self.new_flags()
        self._plan.accumulate_(self._flat, grads, self._one, first=not self.is_filled, nonfinite=flags)
        self.is_filled = True

    def fill(self, last: Tensor, flat: Tensor, scale: Tensor) -> bool:
        """Write (sum + last gradients) * scale into the wire buffer; return False if there is no sum."""
        if self.is_filled:
            flags, grads = self.new_flags(), last.split(self._numels)
            self._plan.accumulate_cast_(
                flat, self._flat, grads, self._one, scale, first=False, nonfinite=flags
            )
        return self.is_filled

    def parts(self, index: int) -> dict[str, Tensor]:
        """Return the memory of one parameter's sum."""
        return {"sum": self._views[index]}


class ExactBeside(_Base):
    """Gradients of any type summed exactly; see `pyengine.accumulator.exact` for the rounds on the wire.

    Args:
        terms: micro-batches of a full window, over all ranks.
    """

    def __init__(self, params: Sequence[Any], *, terms: int) -> None:
        super().__init__(params)
        sizes = [-(-numel // BLOCK) * BLOCK for numel in self._numels]
        offsets = list(itertools.accumulate(sizes, initial=0))
        self._offsets = offsets[:-1]
        self._plan = BucketPlan(self._offsets, self._numels)
        self._exact = ExactSum(self._plan, numel=max(BLOCK, offsets[-1]), terms=terms, device=self._device)
        self._bins = torch.zeros_like(self._exact.bins)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add a micro-batch."""
        self._exact.deposit_(grads, first=not self.is_filled, nonfinite=self.new_flags())
        self.is_filled = True

    def launch(
        self, flat: Tensor, comm: Any, after: Callable[[Tensor], Tensor | None], *, poison: bool
    ) -> Launched:
        """Add the last gradients, which lie in DDP's buffer, and start to sum over all ranks into it.

        Args:
            flat: DDP's buffer, read and later written.
            comm: transport.
            after: gives what is still to be multiplied in.
            poison: void the window.
        """
        grads = flat.split(self._numels)
        self.add(grads)
        self._bins.copy_(self._exact.bins)
        if poison:
            self._bins.fill_(POISONED)
        comm.all_reduce_max(self._bins).wait()
        self._exact.align_(self._bins)
        scale = after(self._one)  # before the collective, behind which `land` is ordered
        work = comm.all_reduce(self._exact.limbs)

        def land(_: Any) -> Tensor:
            total = self._exact.hi.view(torch.float32)
            self._exact.round_(total)
            self._plan.unpack_(grads, total, self._one if scale is None else scale)
            return flat

        return work, land

    def parts(self, index: int) -> dict[str, Tensor]:
        """Return the memory of one parameter's sum."""
        return self._exact.parts(self._offsets[index], self._numels[index])


def packed(numels: Sequence[int]) -> BucketPlan:
    """Return the plan of slots one after the other, as DDP lays them out."""
    return BucketPlan(list(itertools.accumulate(numels, initial=0))[:-1], numels)
