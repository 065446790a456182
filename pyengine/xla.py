"""Gradients on an XLA device: two programs, one for every micro-batch and one for the update.

A program is what was recorded between two launches. A micro-batch's is its forward and backward and the addition to the
sums; none depends on how many there are. The update's is everything else: header, reductions, norm, clipping, and the
optimizer's step, behind which it is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.accumulator.base import Saved, flagged_in
from pyengine.agreement import Settings
from pyengine.header import Header, RunningWindow
from pyengine.host import is_lazy, send
from pyengine.layout import ParamSpec, backward_order, build
from pyengine.norm import FinalPass, Stepper
from pyengine.reducer import Storage
from pyengine.rollback import RollbackStepper
from pyengine.wire import Work


def problems_of_device(device: torch.device, comm: Any, settings: Settings) -> list[str]:
    """Say which arguments make no sense where the parameters lie."""
    if not is_lazy(device):
        return []
    found = []
    if settings.kind == "exact":
        found.append(
            "accumulator='exact' needs sums of integers in memory that XLA does not let one address: use 'fp32' on an XLA "
            "device, whose result is the same on every replica but not for every number of replicas"
        )
    reason = comm.refuses(settings.wire.dtype)
    if reason:
        found.append(f"wire={settings.wire}: {reason}; use wire.FP32()")
    return found


class XlaReducer:
    """Gradients in sums that we own, one tensor a parameter; `.grad` exists from the reduction to the step.

    Nothing overlaps by our doing: the compiler orders a program.

    Args:
        specs: descriptions of `params`, in registration order.
        params: all parameters; those that require no gradient are left alone.
        cap_bytes: without effect: all gradients of a type are reduced by one operation.
        comm: transport.
        storage: how sums travel, and whether every micro-batch is watched for inf and nan.
    """

    overlaps = False

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        cap_bytes: int,
        comm: Any,
        storage: Storage,
    ) -> None:
        del cap_bytes
        self.params: Sequence[Parameter] = list(params)
        self.names: Sequence[str] = [spec.name for spec in specs]
        self._comm, self._wire = comm, storage.wire
        self._order = backward_order(specs)
        self.layout = build(specs, self._order, cap_bytes=sys.maxsize, world_size=comm.world_size)
        self.stepper: Stepper = RollbackStepper(
            {id(params[index]): index for index in self._order}, always_waits=storage.watch
        )
        device = params[0].device
        self._sums = {
            index: torch.zeros_like(
                params[index], dtype=_sum_dtype(params[index].dtype, storage), requires_grad=False
            )
            for index in self._order
        }
        self._zeros = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)]
        self._usage: tuple[list[bool], Tensor] | None = None
        self._is_watching = storage.watch
        self._watched: list[Tensor] = []
        kinds = [(self._sums[index].dtype, params[index].dtype) for index in self._order]
        # 1/count can wait for the optimizer only if no sum is rounded to another type before.
        self._defers_count = all(a == b == self._wire.dtype for a, b in kinds) and not self._wire.folds_count
        self._is_clean = True
        self._used = [False] * len(self.params)
        self._works: list[Work] = []

    def local_window(self, terms: int | None) -> RunningWindow:
        """Return what a window's counts and losses are noted in."""
        return RunningWindow(terms, self._zeros)

    @torch.no_grad()
    def open(self) -> None:
        """Clear what a dropped window has left; in a program of its own, since no other one does that."""
        if not self._is_clean:
            for total in self._sums.values():
                total.zero_()
            self._comm.launch()
            self._is_clean = True

    def begin(self) -> None:
        """Start the window's first backward without gradients."""
        self._clear()
        self._used = [False] * len(self.params)
        self._watched = []

    def before_forward(self, *, syncs: bool) -> None:
        """Do nothing: forwards are not ours."""

    def before_header(self) -> None:
        """Do nothing: no other collective exists."""

    def add(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """Run a backward, add its gradients to the sums, and launch the micro-batch."""
        del micro_batch
        self._is_clean = False
        backward()
        with torch.no_grad():
            for index, total in self._sums.items():
                grad = self.params[index].grad
                if grad is not None:
                    self._used[index] = True
                    total.add_(grad)
            if self._is_watching:
                self._watched.append(_flags([param.grad for param in self.params], self._zeros[0]))
        self._clear()
        self._comm.launch()

    @torch.no_grad()
    def reduce(self, header: Header, backward: Callable[[], None] | None, loss: Tensor | None) -> None:
        """Queue every reduction of the window, and start over with sums of zero."""
        assert backward is None
        del loss
        self._used_anywhere = self._usage_here().clone()
        self._works = [
            self._comm.all_reduce(self._used_anywhere)
        ]  # travels with the header, if that goes first
        inv_count = header.inv_count() if self._wire.folds_count else None
        self._flat = {}
        for index, total in self._sums.items():
            wide = total.clone() if inv_count is None else total.float() * inv_count
            self._flat[index] = wide.to(self._wire.dtype)
            total.zero_()
        self._works += [self._wire.all_reduce_(flat, self._comm) for flat in self._flat.values()]
        self._is_clean = True

    def give_up(self, header: Header) -> None:
        """Do nothing: without a backward in it, no reduction fails half-way."""

    @torch.no_grad()
    def finish(self, header: Header, final: FinalPass) -> None:
        """Publish `.grad`, its norm and finite flags, all of them still to be computed."""
        for work in self._works:
            work.wait()
        inv_count = header.inv_count()
        is_late = not (self._wire.folds_count or self._defers_count)
        values = [self._zeros[0]] * len(self.params)
        grads: list[Tensor | None] = [None] * len(self.params)
        for index, flat in self._flat.items():
            wide = flat.float() * inv_count if is_late else flat.float()
            values[index] = wide.double().square().sum()
            grads[index] = wide
            self.params[index].grad = wide.to(self.params[index].dtype)
        final.sumsq = torch.stack(values)
        final.nonfinite = _flags(grads, self._zeros[0])
        final.used = self._used_anywhere > 0
        self._flat, self._works = {}, []
        if self._defers_count:
            final.multiply(inv_count)
        final.settle()

    @torch.no_grad()
    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients; the compiler makes it part of what uses them."""
        for index in self._order:
            param = self.params[index]
            if param.grad is not None:
                param.grad = (param.grad.float() * scale).to(param.dtype)

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the micro-batches that brought a non-finite gradient; None: not watched."""
        is_watching, watched = self._is_watching, self._watched
        return lambda param: flagged_in(watched, param) if is_watching else None

    @torch.no_grad()
    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""
        saved = {
            self.names[index]: {"sum": total.reshape(-1).clone()}
            for index, total in self._sums.items()
            if self._used[index]
        }
        if self._watched:
            flags = torch.stack(self._watched)
            for index in filter(self._used.__getitem__, self._order):
                saved[self.names[index]]["nonfinite"] = flags[:, index].clone()
        self._comm.launch()
        return saved

    @torch.no_grad()
    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""
        rows = torch.zeros(done, len(self.params), dtype=torch.uint8)
        for index, total in self._sums.items():
            kept = saved.get(self.names[index])
            self._used[index] = kept is not None
            if kept is None:
                total.zero_()
                continue
            total.copy_(kept["sum"].view_as(total))
            if "nonfinite" in kept:
                rows[:, index] = kept["nonfinite"]
        self._watched = list(rows.to(self._zeros[0].device)) if self._is_watching else []
        self._is_clean = False
        self._comm.launch()

    def refuses_load(self) -> list[str]:
        """Return nothing: every load works here."""
        return []

    def order(self) -> list[int]:
        """Return nothing: the order is the compiler's."""
        return []

    def follow(self, order: list[int]) -> None:
        """Do nothing: the order is the compiler's."""

    def _clear(self) -> None:
        for index in self._order:
            self.params[index].grad = None

    def _usage_here(self) -> Tensor:
        """Return which parameters this replica has used, float32 `[num_params]`; sent again only when that changes."""
        if self._usage is None or self._usage[0] != self._used:
            self._usage = self._used, send(self._used, torch.float32, self._zeros[0].device)
        return self._usage[1]


def _sum_dtype(dtype: torch.dtype, storage: Storage) -> torch.dtype:
    is_narrow = dtype.itemsize < torch.float32.itemsize
    return torch.float32 if is_narrow and storage.accumulator == "fp32" else dtype


def _flags(grads: Sequence[Tensor | None], zero: Tensor) -> Tensor:
    """Return which gradients hold inf or nan, uint8 `[num_params]`."""
    none = zero.to(torch.uint8)
    return torch.stack([none if g is None else (~torch.isfinite(g)).any().to(torch.uint8) for g in grads])
