"""Sums of earlier micro-batches beside DDP's buckets.

The hook sends them with the last gradients.

Without these sums DDP sums in `.grad`, whose dtype is that of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm.base import Comm, by_dtype
from pyengine.gradients.arrival import Watch
from pyengine.gradients.bucket import Accumulator, Bucket, aligned, packed
from pyengine.gradients.ddp.bucket_norms import PHASE, ReadNorms
from pyengine.gradients.ddp.hook import Launched
from pyengine.gradients.ddp.private import zero_buckets
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.gradients.norms import ReducedNorms
from pyengine.gradients.slots import Saved, saved_flags, saved_sums, slot_gradient, slots_of
from pyengine.gradients.sums import Fp32Sum
from pyengine.ops.device import runs_ahead
from pyengine.ops.exact_reference import BLOCK
from pyengine.window.nonfinite import flagged_in


class DDPBuckets:
    """One of our buckets for each of DDP's buckets, in DDP's order of parameters.

    Args:
        make: makes a bucket from its parameters and their indices.
        index: of the reduced parameters, in DDP's order.
        dtypes: of the parameters that are summed here; there may be none.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        make: Callable[[Sequence[Any], Sequence[int]], Bucket],
        index: Mapping[Any, int],
        dtypes: Collection[torch.dtype],
    ) -> None:
        self._ddp, self._make, self._index, self._dtypes = ddp, make, index, dtypes
        # By the bucket's first parameter. DDP's own numbers are not unique: in the first backward of
        # static_graph every bucket has number 0.
        self._buckets: dict[int, Bucket] = {}
        self._is_rebuilt = False

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets.values())

    @property
    def used(self) -> set[Any]:
        """Parameters with a gradient of an earlier micro-batch in this window."""
        return {
            p for bucket in self for p, is_used in zip(bucket.params, bucket.used, strict=True) if is_used
        }

    def match_buckets(self) -> None:
        """Make the buckets, or make them again, with the old sums, after DDP has rebuilt its own once."""
        is_current = bool(self._buckets) and self._is_rebuilt == self._ddp._has_rebuilt_buckets
        if not self._dtypes or is_current:
            return
        saved: Saved = {}
        for old in self:
            saved |= old.save(_keys(old))
        done = max((len(old.flagged) for old in self), default=0)
        self._is_rebuilt = self._ddp._has_rebuilt_buckets
        self._buckets = {
            id(bucket.parameters()[0]): self._make(
                bucket.parameters(), [self._index[param] for param in bucket.parameters()]
            )
            for bucket in zero_buckets(self._ddp)
            if bucket.buffer().dtype in self._dtypes
        }
        for new in self if done else ():
            new.load(saved, _keys(new), done=done)

    def clear(self) -> None:
        self._buckets = {}

    def of(self, bucket: Any) -> Bucket | None:
        return self._buckets.get(id(bucket.parameters()[0]))


def _keys(bucket: Bucket) -> list[str]:
    return list(map(str, bucket.indices))


class Fp32DDPBucket(Bucket):
    """Narrow gradients summed in fp32.

    DDP's slots follow each other without gaps. On an accelerator, after a parameter of odd size, the
    gradients and their slots in such a sum have no common alignment and would be added two bytes at a time:
    there the slots of the sum are aligned.
    """

    def __init__(self, params: Sequence[Any], indices: Sequence[int]) -> None:
        numels, device = [p.numel() for p in params], params[0].device
        self._as_sent = plan = packed(numels)
        if runs_ahead(device) and any(offset % PHASE for offset in plan.offsets):
            plan = aligned(numels)
        self._fp32 = Fp32Sum(plan, torch.zeros(plan.flat_numel, dtype=torch.float32, device=device))
        self._sumsq = torch.zeros(len(numels), dtype=torch.float64, device=device)
        super().__init__(params, indices, plan, self._fp32)

    def fill(self, last: Tensor, flat: Tensor, scale: Tensor) -> bool:
        """Write (sum + last gradients) * scale into `flat`, a wire buffer; return False if there is no sum.

        Cost: reads 4 bytes and a gradient, writes one wire element; where the slots of the sum are aligned, 8
        bytes more.
        """
        if self.is_empty:
            return False
        flags, grads = self._start_row(), last.split(self._as_sent.numels)
        self._first_row_of_sum = len(self.flagged) - 1
        if self.plan is self._as_sent:
            self._fp32.deposit_into_wire_(flat, grads, scale, first=False, nonfinite=flags)
            return True
        self._fp32.deposit_(grads, first=False, nonfinite=flags)
        sums = slots_of(self._fp32.flat, self.plan)
        sent = flat[: self._as_sent.flat_numel].split(self._as_sent.numels)
        self.plan.unscale_norm(sums, sent, scale, sumsq=self._sumsq, nonfinite=flags)
        return True


class ExactDDPBucket(Bucket):
    """Gradients of any type summed exactly; see `ExactOverRanks.rounds`."""

    def __init__(self, params: Sequence[Any], indices: Sequence[int], *, terms: Terms, comm: Comm) -> None:
        plan, device = aligned([param.numel() for param in params], BLOCK), params[0].device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._exact = exact_over_ranks(plan, terms=terms, device=device, comm=comm)
        super().__init__(params, indices, plan, self._exact)

    def watches(self) -> list[Watch]:
        """Return no watches: a gradient may arrive more than once in a micro-batch.

        An exact sum has room for one deposit a micro-batch.
        """
        return []

    def launch(
        self, flat: Tensor, after: Callable[[], Tensor | None], norms: ReadNorms | None, *, poison: bool
    ) -> Launched:
        """Add the last gradients from `flat`, DDP's buffer; launch the sum over ranks.

        The result, times what `after` returns, is written to `flat`, and `norms` reads it. `poison` makes the
        sum nan on every rank.
        """
        grads = flat.split(self.plan.numels)
        self.deposit(grads)
        work = self._exact.rounds(poison=poison)
        scale = after()

        def write_back() -> Tensor:
            rounded, factor = self._exact.rounded, self._one if scale is None else scale
            if norms is None:
                self.plan.unpack_(grads, rounded, factor)
            else:
                norms(slots_of(rounded, self.plan), flat, factor)
            return flat

        return work, write_back


class GradSums(Accumulator):
    """Sums that autograd keeps in `.grad`, of parameters without a bucket of ours, if any."""

    def __init__(
        self, params: Sequence[Any], indices: Sequence[int], device: torch.device, *, watch: bool
    ) -> None:
        self.params, self.indices, self._is_watching = list(params), list(indices), watch
        self._index = {param: index for index, param in enumerate(params)}
        self._device = device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._norms: dict[tuple[int, ...], ReducedNorms] = {}
        self.begin()

    def begin(self) -> None:
        # By micro-batch of this window, uint8 `[params]`: 1 where the sum so far was not finite.
        self.flagged: list[Tensor] = []
        self._last: Tensor | None = None

    def collect(self) -> None:
        """Check the sums after an earlier micro-batch, if micro-batches are checked."""
        if self._is_watching:
            flags = self._new_row()
            for params in by_dtype(self._index):
                self._look(params, [slot_gradient(param) for param in params], flags)

    def check_last(self, bucket: Any) -> None:
        """Check a bucket of the last micro-batch before it is reduced."""
        params = bucket.parameters()
        if self._is_watching and params[0] in self._index:
            if self._last is None:
                self._last = self._new_row()
            self._look(params, bucket.buffer().split([p.numel() for p in params]), self._last)

    def blame(self) -> Callable[[int], list[int] | None]:
        # Only the first micro-batch is named: a sum that is not finite stays not finite.
        rows, is_watching = self.flagged, self._is_watching
        return lambda slot: flagged_in(rows, slot)[:1] if is_watching else None

    def save(self, names: Sequence[str]) -> Saved:
        grads = enumerate(map(slot_gradient, self.params))
        sums = {slot: {"sum": grad.reshape(-1)} for slot, grad in grads if grad is not None}
        return saved_sums(sums, self.flagged, names)

    def load(self, saved: Saved, names: Sequence[str], *, done: int) -> None:
        self.flagged = [*saved_flags(saved, names, done, self._device)] if self._is_watching else []
        for name, param in zip(names, self.params, strict=True):
            if name in saved:
                param.grad = torch.empty_like(param)
                slot = param.grad.as_strided((param.numel(),), (1,), param.grad.storage_offset())
                slot.copy_(saved[name]["sum"])

    def _new_row(self) -> Tensor:
        self.flagged.append(torch.zeros(len(self.params), dtype=torch.uint8, device=self._device))
        return self.flagged[-1]

    def _look(self, params: Sequence[Any], grads: Sequence[Tensor | None], flags: Tensor) -> None:
        slots = tuple(self._index[param] for param in params)
        if slots not in self._norms:
            plan = packed([param.numel() for param in params])
            self._norms[slots] = ReducedNorms([(plan, slots)], self._device)
        norms = self._norms[slots]
        norms.begin()
        norms.read(0, grads, None, self._one)
        norms.copy_flags_to(flags)
