"""Exact sums of sharded parameters: the same bits as over DDP and own buckets, on any mesh.

FSDP gathers whole parameters, so a micro-batch's gradient has the bits that it has without FSDP. It is summed
as a whole, and ranks merge whole sums; each keeps its shard of the result. Norm and flags are read off the
whole, so they are no matter of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.comm.staged import Staged
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.fsdp.places import is_first, shard_of
from pyengine.gradients.fsdp.sharded import Managed, Sharded
from pyengine.gradients.param_sums import ExactParamSum
from pyengine.gradients.slots import Saved, as_gradient, load_parts, saved_flags
from pyengine.gradients.sums import SlotNorms
from pyengine.gradients.used_anywhere import Told
from pyengine.ops.device import Readback, send
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.window.nonfinite import flagged_in
from pyengine.window.verdict import check_agreement
from pyengine.wire import FP32

_USED, _GAVE_UP = 1, 2


class UnitSum(ExactParamSum):
    """The exact sum of one unit's gradients, unsharded.

    Args:
        params: the unit's, sharded; at least one.
        indices: theirs, in the order of registration.
        terms: of a full window.
        comm: over all ranks.

    Attributes:
        indices: as given.
        num_bytes: that this holds.

    Bytes an element: 8.02 on every rank, and 2 more where parameters are narrow.
    """

    def __init__(
        self, params: Sequence[Parameter], indices: Sequence[int], *, terms: Terms, comm: Comm
    ) -> None:
        super().__init__(params, terms=terms, comm=comm, num_flags=len(params))
        self.indices = list(indices)
        self._norms = SlotNorms(self._plan, self.indices, self.device)
        flat = self._exact.rounded
        if params[0].dtype != torch.float32:
            flat = torch.empty(flat.numel(), dtype=params[0].dtype, device=self.device)
        slots = list(zip(self._plan.offsets, self._plan.numels, strict=True))
        self._rounded = [self._exact.rounded[start : start + numel] for start, numel in slots]
        is_apart = flat is not self._exact.rounded
        self._slots = [flat[start : start + numel] for start, numel in slots] if is_apart else self._rounded
        self.num_bytes = sum(t.nbytes for t in self._exact.round_tensors()) + flat.nbytes * is_apart

    def rounds(self, used: Sequence[bool], *, poison: bool) -> Staged:
        """Merge the sums of all ranks, and tell which parameters any of them used; see
        `ExactOverRanks.rounds`.
        """
        if not self.is_filled:
            nothing = [None] * len(self.params)
            self._exact.deposit_(nothing, first=True, nonfinite=torch.zeros_like(self._exact.flags))
        flags = [_GAVE_UP if poison else _USED * is_used for is_used in used]
        self._exact.flags.copy_(send(flags, torch.uint8, self.device))
        return self._exact.rounds()

    def land(self, scale: Tensor | None, final: FinalPass) -> Tensor:
        """Read the norm of the rounded sums times `scale`, and give every parameter its shard of that, in
        memory of this object.

        Args:
            scale: float32 0-dim; None for 1.
            final: its `sumsq`, `nonfinite` and `void` are written.

        Returns:
            uint8 `[params]`, 0 where no rank has used a parameter.

        Cost: reads 4 bytes and writes an element.
        """
        flags = self._exact.flags
        self._norms.read(self._rounded, self._slots, self._one if scale is None else scale, final)
        final.void = torch.where((flags == _GAVE_UP).any(), torch.nan, final.void)
        for param, slot in zip(self.params, self._slots, strict=True):
            param.grad = as_gradient(shard_of(slot.view(param.shape), param), param)
        return flags


class ExactFSDPReducer(Sharded):
    """Gradients of a sharded model, summed exactly; nothing overlaps with a backward.

    Args:
        managed: what of the model is driven.
        terms: of a full window.
    """

    def __init__(self, managed: Managed, *, terms: Terms) -> None:
        super().__init__(managed, watches=False, widens=False)
        index = {id(param): i for i, param in enumerate(self.params)}
        self._sums = [
            UnitSum(unit.params, [index[id(param)] for param in unit.params], terms=terms, comm=self.comm)
            for unit in managed.units
            if any(param.requires_grad for param in unit.params)
        ]
        self.held_bytes = sum(total.num_bytes for total in self._sums)
        self._speaks = send([is_first(param) for param in self.params], torch.bool, self.params[0].device)
        self._works: list[Staged] = []
        self._told: Told | None = None
        self._divisor: Divisor | None = None

    def begin(self) -> None:
        super().begin()
        self._divisor, self._told, self._works = None, None, []
        for total in self._sums:
            total.begin()

    @contextmanager
    def add(self) -> Iterator[None]:
        """Let the body run as under no_sync."""
        yield
        self.collect()

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Let the body run as under no_sync, too."""
        yield

    def collect(self) -> None:
        """Deposit what micro-batches have left in the unsharded parameters' `.grad`."""
        is_void, grads = self.unsharded.is_void, self.unsharded.take()
        self.end_padding()
        for total in self._sums if not is_void else []:
            total.add([_flat(grads.get(index)) for index in total.indices])

    def reduce(self, header: Header) -> None:
        if header.is_refused():
            check_agreement(header, header.totals(), self.comm)
        self._divisor = Divisor(header.inv_count, FP32(), header.inv_scale)
        self._start(poison=False)

    def give_up(self) -> None:
        self.end_padding()
        if self._divisor is not None:
            self._start(poison=True)

    def finish(self, final: FinalPass) -> None:
        is_sent = len(self._works) == len(self._sums) and not any(work.rounds_left for work in self._works)
        if self._divisor is None or not is_sent:
            raise RuntimeError(
                "gradients were not reduced: a collective failed on this rank. Nothing is stepped here, and "
                "other ranks may have gone on: start all ranks anew, from a checkpoint"
            )
        scale, flags = self._divisor.after_wire(), []
        for total, work in zip(self._sums, self._works, strict=True):
            work.wait()
            flags.append(total.land(scale, final))
        if self._told is not None:
            self._told.drop_unused(self.params)
        else:
            self._drop_flagged(flags)
        # All ranks have read all of it, and one says it.
        final.sumsq = torch.where(self._speaks, final.sumsq, 0.0)

    def blame(self) -> Callable[[int], list[int] | None]:
        flagged = [(total.indices, total.flagged) for total in self._sums]

        def blame(index: int) -> list[int] | None:
            for indices, flags in flagged:
                if index in indices:
                    return flagged_in(flags, indices.index(index))
            return None

        return blame

    def save(self) -> Saved:
        return {
            self.names[index]: {
                **{part: tensor.clone() for part, tensor in total.parts(slot).items()},
                "nonfinite": torch.stack(total.flagged, 1)[slot],
            }
            for total in self._sums
            if total.is_filled
            for slot, index in enumerate(total.indices)
            if self.unsharded.used[index]
        }

    def load(self, saved: Saved, *, done: int) -> None:
        for total in self._sums:
            total.resume()
            names = [self.names[index] for index in total.indices]
            total.flagged = [*saved_flags(saved, names, done, total.device)]
            for slot, (index, name) in enumerate(zip(total.indices, names, strict=True)):
                self.unsharded.used[index] = self.unsharded.used[index] or name in saved
                load_parts(total.parts(slot), saved.get(name))

    def _start(self, *, poison: bool) -> None:
        """Start what is still missing: a first round of every unit, then the later ones."""
        used = self.unsharded.used
        for total in self._sums[len(self._works) :]:
            self._works.append(total.rounds([used[index] for index in total.indices], poison=poison))
        while any(work.rounds_left for work in self._works):
            for work in self._works:
                work.step()
        if self.used.by_hosts and self._told is None:
            self._told = self.used.tell([poison or is_used for is_used in used])

    def _drop_flagged(self, flags: Sequence[Tensor]) -> None:
        """Leave no gradient where no rank has used a parameter, as the landed flags of every unit say.

        Cost: the host waits once for the device, if this rank left some parameter unused.
        """
        indices = [index for total in self._sums for index in total.indices]
        if not all(self.unsharded.used[index] for index in indices):
            for index, is_used in zip(indices, Readback(torch.cat([*flags])).get(), strict=True):
                if not is_used:
                    self.params[index].grad = None


def _flat(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().reshape(-1)
