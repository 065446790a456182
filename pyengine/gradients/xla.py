"""Gradients on an XLA device.

Every micro-batch runs the same compiled program, and the update runs a second program.

A program consists of the operations recorded between two launches. The program of a micro-batch contains the
forward, the backward and the addition to the sums, and does not depend on the number of micro-batches. The
program of the update contains the header, the reductions, the norm, clipping and the optimizer step, and is
launched after the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.gradients.base import Reducer
from pyengine.gradients.layout import ParamSpec, backward_order, build
from pyengine.gradients.settings import Settings, sum_dtype
from pyengine.ops.device import flush, is_lazy, send
from pyengine.step.rollback import RollbackStepper
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.window.nonfinite import flagged_in, is_not_finite


def problems_of_device(device: torch.device, comm: Comm, settings: Settings) -> list[str]:
    """Return error messages for arguments that the parameters' device does not support."""
    if not is_lazy(device) or settings.problems():
        return []
    found = []
    if settings.kind == "exact":
        found.append(
            "accumulator='exact' sums integers in memory that it addresses directly, which XLA does not "
            "allow: on an XLA device use 'fp32', whose result is the same on every replica but depends on "
            "the number of replicas"
        )
    if settings.wire.needs_exchange and not comm.can_exchange:
        found.append(
            f"wire={settings.wire}: this wire exchanges chunks of a bucket between ranks, for which the "
            "engine has no collective in XLA programs; use wire.BF16() or wire.FP32()"
        )
    elif reason := comm.unsupported_reason(settings.wire.dtype):
        found.append(f"wire={settings.wire}: {reason}; use wire.FP32()")
    return found


class XlaReducer(Reducer):
    """Gradients in sums that the engine owns: one tensor per parameter, of the parameter's shape.

    The tensors have the dtype of the sum. `finish` sets `.grad` to the mean, and the next window clears
    it. The XLA compiler schedules each program and determines what overlaps. One operation reduces all
    gradients of one dtype, regardless of the bucket size. Frozen parameters are left unchanged.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        comm: Comm,
        settings: Settings,
    ) -> None:
        self.params: Sequence[Parameter] = list(params)
        self.names: Sequence[str] = [spec.name for spec in specs]
        self._comm, self._wire = comm, settings.wire
        self._order = backward_order(specs)
        self.layout = build(specs, self._order, cap_bytes=sys.maxsize)
        self.stepper = RollbackStepper(
            {id(params[index]): index for index in self._order}, always_waits=settings.raises
        )
        self._device = device = params[0].device
        self._sums = {
            index: torch.zeros_like(
                params[index], dtype=sum_dtype(settings.kind, params[index].dtype), requires_grad=False
            )
            for index in self._order
        }
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._usage: tuple[list[bool], Tensor] | None = None
        self._is_watching = settings.raises
        self._watched: list[Tensor] = []
        self._is_clean = True
        self._used = [False] * len(self.params)
        self._works: list[Work] = []
        self._flat: dict[int, Tensor] = {}

    @torch.no_grad()
    def open(self) -> None:
        """Set the sums of a dropped window to zero, in a separate program."""
        if not self._is_clean:
            for total in self._sums.values():
                total.zero_()
            flush(self._device)
            self._is_clean = True

    def begin(self) -> None:
        self._clear()
        self._used = [False] * len(self.params)
        self._watched = []

    def collect(self) -> None:
        """Accumulate the gradients, and launch the program of the micro-batch."""
        self._is_clean = False
        with torch.no_grad():
            for index, total in self._sums.items():
                grad = self.params[index].grad
                if grad is not None:
                    self._used[index] = True
                    # `add_` is slower because it first runs in Python on a meta tensor, to infer the shape.
                    # Both forms donate the buffer of the sum to the program.
                    torch.add(total, grad, out=total)
            if self._is_watching:
                self._watched.append(flagged(self._sumsq([param.grad for param in self.params])))
        self._clear()
        flush(self._device)

    @torch.no_grad()
    def reduce(self, header: Header) -> None:
        """Queue every reduction, and set the sums to zero."""
        self._divisor = Divisor(header.inv_count, self._wire, header.inv_scale)
        self._used_anywhere = self._usage_here().clone()
        # This all-reduce is in the same program as the header's all-reduce, if the header comes first.
        self._works = [self._comm.all_reduce(self._used_anywhere)]
        inv_count = self._divisor.before_wire()
        self._flat = {}
        for index, total in self._sums.items():
            wide = total.clone() if inv_count is None else total.float() * inv_count
            self._flat[index] = wide.to(self._wire.dtype)
            total.zero_()
        self._works += [self._wire.all_reduce_(flat, self._comm) for flat in self._flat.values()]
        self._is_clean = True

    def give_up(self) -> None:
        """Do nothing, because no exception in a backward can interrupt a reduction."""

    @torch.no_grad()
    def finish(self, final: FinalPass) -> None:
        """Record the operations that write the mean to `.grad`; nothing is computed yet."""
        for work in self._works:
            work.wait()
        scale = self._divisor.after_wire()
        grads: list[Tensor | None] = [None] * len(self.params)
        for index, flat in self._flat.items():
            wide = flat.float() if scale is None else flat.float() * scale
            self.params[index].grad = grads[index] = wide.to(self.params[index].dtype)
        final.sumsq = self._sumsq(grads)
        final.nonfinite = flagged(final.sumsq)
        final.used = self._used_anywhere > 0
        self._flat, self._works = {}, []

    def blame(self) -> Callable[[int], list[int] | None]:
        is_watching, watched = self._is_watching, self._watched
        return lambda param: flagged_in(watched, param) if is_watching else None

    def release(self, *, keeps_grad: bool) -> None:
        self._sums, self._flat, self._works = {}, {}, []
        if not keeps_grad:
            self._clear()

    def _clear(self) -> None:
        for index in self._order:
            self.params[index].grad = None

    def _sumsq(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of squares of each gradient, as float64 `[num_params]`; 0 for None."""
        return torch.stack([self._zero if g is None else g.double().square().sum() for g in grads])

    def _usage_here(self) -> Tensor:
        """Return float32 flags of the parameters that this replica has used.

        The flags are copied to the device only when they change.
        """
        if self._usage is None or self._usage[0] != self._used:
            self._usage = self._used, send(self._used, torch.float32, self._device)
        return self._usage[1]


def flagged(sumsq: Tensor) -> Tensor:
    """Return uint8 flags, 1 for each gradient with inf or nan, computed from the sums of squares.

    In float64, neither the square of a float32 number nor a sum of such squares overflows. On devices where
    float64 has the range of float32, a finite gradient may be flagged. Its norm is then infinite, and the
    step is skipped.
    """
    return is_not_finite(sumsq).to(torch.uint8)
