"""Sums of what earlier micro-batches brought, in buffers that are not DDP's, until DDP hands out the last
one's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm.base import by_dtype
from pyengine.gradients.arrival import Watch
from pyengine.gradients.ddp.bucket_norms import PHASE, OneBucket
from pyengine.gradients.ddp.hook import Launched
from pyengine.gradients.ddp.private import zero_buckets
from pyengine.gradients.param_sums import ExactParamSum, ParamSum, aligned, packed
from pyengine.gradients.slot_group import SlotGroup, cut
from pyengine.gradients.slots import Saved, load_parts, saved_flags, slot_gradient
from pyengine.gradients.sums import Fp32Sum, SlotNorms
from pyengine.ops.device import runs_ahead


class Sums:
    """The sums of all of DDP's buckets, in DDP's own order.

    Args:
        ddp: the wrapped model.
        make: makes the sum of a bucket from its parameters.
        dtypes: of the buckets that have a sum here.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        make: Callable[[Sequence[Any]], BucketSum],
        dtypes: Collection[torch.dtype],
    ) -> None:
        self._ddp, self._make, self._dtypes = ddp, make, dtypes
        # By the bucket's first parameter, as `HookState.wire_buffer`.
        self._sums: dict[int, BucketSum] = {}
        self._is_rebuilt = False

    @property
    def used(self) -> set[Any]:
        """Parameters that have brought something in this window."""
        sums = self._sums.values()
        return {p for total in sums for p, is_used in zip(total.params, total.used, strict=True) if is_used}

    def begin(self) -> None:
        for total in self._sums.values():
            total.begin()

    def watches(self) -> list[Watch]:
        """Return what is to be watched during the coming backward of an earlier micro-batch; see
        `BucketSum.watches`.
        """
        self.match_buckets()
        return [watch for total in self._sums.values() for watch in total.watches()]

    def add(self) -> None:
        """Accumulate what `watches` has not, once an earlier micro-batch's backward has returned, and set
        `.grad` to None.
        """
        self.match_buckets()
        for total in self._sums.values():
            total.collect()

    def match_buckets(self) -> None:
        """Make the sums, or make them anew, if they are not those of DDP's present buckets."""
        if not self._sums or self._is_rebuilt != self._ddp._has_rebuilt_buckets:
            self.lay_out()

    def of(self, bucket: Any) -> BucketSum | None:
        """Return the sum of a bucket that DDP hands out."""
        return self._sums.get(id(bucket.parameters()[0]))

    def flagged(self) -> list[tuple[list[Any], list[Tensor]]]:
        """Return (parameters, their flags for each micro-batch of this window) of every sum."""
        return [(total.params, total.flagged) for total in self._sums.values()]

    def save(self, names: Mapping[Any, str]) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing if there were
        none.
        """
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
            if total.used[index]
        }

    def load(self, saved: Saved, names: Mapping[Any, str], *, done: int) -> None:
        self.match_buckets()
        for total in self._sums.values():
            total.resume()
            total.flagged = [*saved_flags(saved, [names[p] for p in total.params], done, total.device)]
            total.used = [names[param] in saved for param in total.params]
            for index, param in enumerate(total.params):
                load_parts(total.parts(index), saved.get(names[param]))

    def lay_out(self) -> None:
        """Make the sums anew for DDP's buckets, which it rebuilds once; what has been summed is copied.

        Cost: a read and a write of the old sums.
        """
        old = {
            id(param): (total.parts(index), [flags[index] for flags in total.flagged])
            for total in self._sums.values()
            for index, param in enumerate(total.params)
        }
        was_filled, used = any(total.is_filled for total in self._sums.values()), self.used
        self._is_rebuilt = self._ddp._has_rebuilt_buckets
        self._sums = {
            id(bucket.parameters()[0]): self._make(bucket.parameters())
            for bucket in zero_buckets(self._ddp)
            if bucket.buffer().dtype in self._dtypes
        }
        for total in self._sums.values():
            if was_filled:
                total.resume()
            total.used = [param in used for param in total.params]
            for index, param in enumerate(total.params):
                before, flags = old.get(id(param), ({}, []))
                for name, part in before.items():
                    total.parts(index)[name].copy_(part)
                while len(total.flagged) < len(flags):
                    total.new_flags()
                for row, flag in zip(total.flagged, flags, strict=False):
                    row[index] = flag


class BucketSum(ParamSum):
    """The sum of one of DDP's buckets, which takes gradients out of `.grad`.

    Attributes:
        used: by parameter, whether it has brought something in this window.
    """

    def begin(self) -> None:
        super().begin()
        self.used = [False] * len(self.params)

    def watches(self) -> list[Watch]:
        """Return what is to be watched during the coming backward of an earlier micro-batch, so that
        gradients are accumulated while the cache has them; nothing where that is not to be.
        """
        return []

    def collect(self) -> None:
        """Accumulate what an earlier micro-batch has left in `.grad`, and set that to None."""
        self.add([slot_gradient(param) for param in self.params])
        for index, param in enumerate(self.params):
            self.used[index] |= param.grad is not None
            param.grad = None


class Fp32BucketSum(BucketSum):
    """Narrow gradients summed in fp32, about a megabyte at a time.

    DDP lays parameters out one after the other. On an accelerator, behind one of an odd size, gradients and
    their places in such a sum have no common alignment, and are added two bytes at a time: there the sum has
    aligned places of its own.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        numels, device = [p.numel() for p in params], params[0].device
        self._as_sent = plan = packed(numels)
        if runs_ahead(device) and any(offset % PHASE for offset in plan.offsets):
            plan = aligned(numels)
        self._fp32 = Fp32Sum(plan, torch.zeros(plan.flat_numel, dtype=torch.float32, device=device))
        itemsize = params[0].dtype.itemsize
        self._groups = [SlotGroup(plan, params, slots) for slots in cut(numels, itemsize, device)]
        self._over = {group.start: self._fp32.over(group.plan) for group in self._groups}
        super().__init__(params, plan, self._fp32)
        self._sumsq = torch.zeros(len(numels), dtype=torch.float64, device=device)

    def begin(self) -> None:
        super().begin()
        self._row: Tensor | None = None  # flags of the micro-batch that is being accumulated
        self._set_first(True)

    def resume(self) -> None:
        super().resume()
        self._set_first(False)

    def watches(self) -> list[Watch]:
        """Return a watch a group. Nothing where backwards before the micro-batch's last have left gradients:
        what is there has not arrived.
        """
        if any(param.grad is not None for param in self.params):
            return []
        return [
            Watch(group.params, partial(_has_gradient, group), partial(self._store, group))
            for group in self._groups
        ]

    def collect(self) -> None:
        """Accumulate the groups that never became complete."""
        self._begin_row()
        for group in self._groups:
            if group.is_first or any(param.grad is not None for param in group.params):
                self._store(group)
        self._row, self.is_filled = None, True

    def _store(self, group: SlotGroup) -> None:
        flags = self._begin_row()[group.start : group.stop]
        self._over[group.start].deposit_(group.pop(self.used), first=group.is_first, nonfinite=flags)
        group.is_first = False

    def _begin_row(self) -> Tensor:
        """Return this micro-batch's flags, uint8 `[params]`."""
        if self._row is None:
            self._row = self.new_flags()
        return self._row

    def _set_first(self, is_first: bool) -> None:
        for group in self._groups:
            group.is_first = is_first

    def fill(self, last: Tensor, flat: Tensor, scale: Tensor) -> bool:
        """Write (sum + last gradients) * scale into a wire buffer.

        Args:
            last: the gradients, `[numel]`, DDP's, read.
            flat: of the wire's type, `[numel]`, written.
            scale: float32, 0-dim.

        Returns:
            False if there is no sum; nothing is written then.

        Cost: reads 4 bytes and a gradient, writes one wire element; where the sum has places of its own, 8
        bytes more.
        """
        if self.is_filled:
            earlier = torch.stack(self.flagged).amax(0).bool() if self.flagged else None
            flags, grads = self.new_flags(), last.split(self._as_sent.numels)
            self._write(flat, grads, scale, flags)
            if earlier is not None:  # the flags are of the sum: what was in it before does not count
                flags.masked_fill_(earlier, 0)
        return self.is_filled

    def _write(self, flat: Tensor, grads: Sequence[Tensor], scale: Tensor, flags: Tensor) -> None:
        plan = self._plan
        if plan is self._as_sent:
            self._fp32.deposit_into_wire_(flat, grads, scale, first=False, nonfinite=flags)
            return
        self._fp32.deposit_(grads, first=False, nonfinite=flags)
        slots = zip(plan.offsets, plan.numels, strict=True)
        sums = [self._fp32.flat[offset : offset + numel] for offset, numel in slots]
        sent = flat[: self._as_sent.flat_numel].split(self._as_sent.numels)
        plan.unscale_norm(sums, sent, scale, sumsq=self._sumsq, nonfinite=flags)


def _has_gradient(group: SlotGroup, index: int) -> bool:
    return group.params[index].grad is not None


class ExactBucketSum(BucketSum, ExactParamSum):
    """Gradients of any type summed exactly; see `pyengine.gradients.accumulator.exact` for the rounds on the
    wire.
    """

    def launch(
        self, flat: Tensor, after: Callable[[], Tensor | None], norms: OneBucket | None, *, poison: bool
    ) -> Launched:
        """Add the last gradients, which lie in DDP's buffer, and start to sum over all ranks into it.

        Args:
            flat: DDP's buffer, `[numel]`, read and later written.
            after: returns what is still to be multiplied in, float32, 0-dim; None for nothing.
            norms: read what lands; None for nobody.
            poison: void the window.

        Cost: the deposit and the rounds of `ExactOverRanks`; when they have landed, 8 bytes an element to
        write a float32 gradient.
        """
        grads = flat.split(self._plan.numels)
        self.add(grads)
        work = self._exact.rounds(poison=poison)
        scale = after()

        def land() -> Tensor:
            rounded, factor = self._exact.rounded, self._one if scale is None else scale
            if norms is None:
                self._plan.unpack_(grads, rounded, factor)
                return flat
            slots = zip(self._plan.offsets, self._plan.numels, strict=True)
            sources = [rounded[offset : offset + numel] for offset, numel in slots]
            norms.land(sources, flat, factor, writes=True)
            return flat

        return work, land


class Watched:
    """Which micro-batches brought inf or nan to parameters whose sums are autograd's own.

    Args:
        params: the parameters.

    Attributes:
        rows: flags of each micro-batch of this window, uint8 `[params]`; what was flagged once stays so.
        index: a parameter's place in them.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.index = {param: index for index, param in enumerate(params)}
        self._device = params[0].device
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        self._norms: dict[tuple[int, ...], SlotNorms] = {}
        self.begin()

    def begin(self) -> None:
        self.rows: list[Tensor] = []
        self._last: Tensor | None = None

    def add(self) -> None:
        """Check what an earlier micro-batch has left in `.grad`: reads one element."""
        flags = self._new_row()
        for params in by_dtype(self.index):
            self._look(params, [slot_gradient(param) for param in params], flags)

    def add_last(self, bucket: Any) -> None:
        """Check a bucket of the last micro-batch, which DDP has handed out and nobody has sent yet: reads one
        element.
        """
        if self._last is None:
            self._last = self._new_row()
        params = bucket.parameters()
        if params[0] in self.index:
            self._look(params, bucket.buffer().split([p.numel() for p in params]), self._last)

    def save(self, param: Any) -> dict[str, Tensor]:
        """Return the flags of a parameter so far, uint8 `[micro_batches]`, the caller's; nothing if it is not
        here.
        """
        return {"nonfinite": torch.stack(self.rows)[:, self.index[param]]} if param in self.index else {}

    def load(self, saved: Saved, names: Mapping[Any, str], *, done: int) -> None:
        """Go on from what was saved after `done` micro-batches."""
        self.rows = [*saved_flags(saved, [names[param] for param in self.index], done, self._device)]

    def _new_row(self) -> Tensor:
        self.rows.append(torch.zeros(len(self.index), dtype=torch.uint8, device=self._device))
        return self.rows[-1]

    def _look(self, params: Sequence[Any], grads: Sequence[Tensor | None], flags: Tensor) -> None:
        places = tuple(self.index[param] for param in params)
        if places not in self._norms:
            plan = packed([param.numel() for param in params])
            self._norms[places] = SlotNorms(plan, places, self._device)
        norms = self._norms[places]
        flags.index_copy_(0, norms.params, norms.flags(grads, self._one))
