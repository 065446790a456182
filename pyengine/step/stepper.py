"""Optimizer steps that are skipped if the window must not be used."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import SGD, Muon, Optimizer
from torch.optim import optimizer as torch_optimizer

from pyengine.ops.device import runs_ahead
from pyengine.ops.pointers import DTYPE_CODES, Pointers
from pyengine.ops.versions import BucketPlan
from pyengine.window.final_pass import FinalPass

_log = logging.getLogger("pyengine.step")


class Stepper(Protocol):
    def needs_host(self, optimizer: Optimizer) -> bool:
        """Whether the host waits in `step` for the outcome of the window; equal on every rank."""

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        """Step with the current gradients, unless `final` forbids the use of the window."""


class PlainStepper:
    """Skips steps on the device: fused optimizers skip their own step, and other steps are undone.

    A step can be undone only for torch's own optimizers; for any other optimizer the host waits for the
    outcome of the window. The host also waits for it if a step would create state, so that a skipped step
    leaves no state behind.

    Cost: a check of every parameter and its state. A step that may be undone also needs two launches per
    dtype, which read the skip flag, and read and write parameters and state only if the flag is set. During
    the step it needs memory for a copy of parameters and state: 12 bytes per parameter for Adam in float32.
    """

    def __init__(self) -> None:
        # For each optimizer, the tensors to which its last step wrote, as a list and as targets of a copy.
        self._seen: WeakKeyDictionary[Optimizer, tuple[list[Any], _Targets | None]] = WeakKeyDictionary()
        # For each optimizer, `found` (in `_has_state`) when its state was last seen to be complete.
        self._complete: WeakKeyDictionary[Optimizer, tuple[Any, ...]] = WeakKeyDictionary()

    def needs_host(self, optimizer: Optimizer) -> bool:
        return not skips_on_device(optimizer) and self.targets(optimizer) is None

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        name, found_inf = type(optimizer).__name__, final.found_inf
        # torch's fused SGD does not initialize the momentum that it creates in a skipped step.
        if skips_on_device(optimizer) and self._has_state(optimizer):
            _log.debug("step %s, which reads found_inf and skips the step itself", name)
            fused: Any = optimizer
            fused.found_inf = found_inf
            try:
                optimizer.step()
            finally:
                del fused.found_inf
            return
        is_undone = runs_ahead(found_inf.device) and not runs_user_code(optimizer)
        targets = self.targets(optimizer) if is_undone else None
        if targets is not None and (copies := allocate(targets)) is not None:
            _log.debug("step %s; the device undoes the step if it must be skipped", name)
            with undoing(targets, copies, found_inf):
                optimizer.step()
        elif not bool(found_inf):
            _log.debug("step %s after the host has read the decision", name)
            optimizer.step()

    def _has_state(self, optimizer: Optimizer) -> bool:
        """Whether a step would create no state; every state is checked only if something has changed."""
        groups, state = optimizer.param_groups, optimizer.state
        found = (
            id(state),
            len(state),
            [group.get("momentum") for group in groups],
            [param.grad is None for group in groups for param in group["params"]],
        )
        if self._complete.get(optimizer) == found:
            return True
        is_complete = _written(optimizer) is not None
        if is_complete:
            self._complete[optimizer] = found
        return is_complete

    def targets(self, optimizer: Optimizer) -> _Targets | None:
        """Return the tensors that a step writes, with a plan per dtype; None if the step cannot be undone.

        The result is equal on every rank, and is known only for torch's own optimizers. A first step cannot
        be undone, because it creates state. A step with `capturable=False` cannot be undone either, because
        it counts steps on the host.

        Cost: a check of every parameter; the tensors are checked again only if they differ from those
            of the last step.
        """
        if not is_torchs(optimizer) or not all(g.get("capturable", True) for g in optimizer.param_groups):
            return None
        tensors = _written(optimizer)
        if tensors is None:
            return None
        seen, targets = self._seen.get(optimizer, ([], None))
        if len(seen) != len(tensors) or not all(map(is_, seen, tensors)):
            targets = _planned(tensors)
            self._seen[optimizer] = tensors, targets
        return targets


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer obeys the tensor `found_inf`, so that the host need not know the outcome.

    Only torch's own optimizers with fused steps in all groups obey this tensor. A wrapper that forwards
    attributes would not pass on `found_inf`, a subclass may use gradients before its step, and torch raises
    an assertion error for a group that is not fused.
    """
    return (
        is_torchs(optimizer)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not hasattr(optimizer, "found_inf")
    )


# ---- undoing a step on the device ----


_ALIGN_ELEMENTS = 8  # 16 bytes in the narrowest dtype


_Targets = Sequence[tuple[BucketPlan, Pointers]]


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is one of torch's own; a subclass may do more in its step."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def runs_user_code(optimizer: Optimizer) -> bool:
    """Whether user code runs inside the optimizer's step and could read values that are later undone."""
    replaced = vars(optimizer).get("step")
    # A learning-rate scheduler replaces `step` with a wrapper that counts calls.
    is_replaced = replaced is not None and getattr(replaced, "__wrapped__", None) is not type(optimizer).step
    hooks: Any = optimizer
    return is_replaced or any(
        (
            hooks._optimizer_step_pre_hooks,
            hooks._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    )


@contextmanager
def undoing(targets: _Targets, copies: Sequence[Tensor], found_inf: Tensor) -> Iterator[None]:
    """Undo the body's writes to `targets` if `found_inf` is not 0; the host does not read the flag."""
    one = torch.ones_like(found_inf)
    for (plan, tensors), copy in zip(targets, copies, strict=True):
        plan.pack_(copy, tensors, one, only_if=found_inf)
    try:
        yield
    finally:
        for (plan, tensors), copy in zip(targets, copies, strict=True):
            plan.unpack_(tensors, copy, one, only_if=found_inf)


def allocate(targets: _Targets) -> list[Tensor] | None:
    """Return memory for copies of `targets`, or None if there is not enough memory."""
    try:
        return [
            torch.empty(plan.flat_numel, dtype=pointers.dtype, device=pointers.device)
            for plan, pointers in targets
        ]
    except torch.OutOfMemoryError:
        return None


# These optimizers create `momentum_buffer` if it is missing or None. Other optimizers check for any state.
_WITH_LATE_MOMENTUM = SGD, Muon


def _written(optimizer: Optimizer) -> list[Any] | None:
    """Return the parameters that a step changes, each with its state; None if the step would create state."""
    tensors: list[Any] = []
    state_of = optimizer.state
    has_late_momentum = type(optimizer) in _WITH_LATE_MOMENTUM
    for group in optimizer.param_groups:
        has_no_state = type(optimizer) is SGD and not group["momentum"]
        for param in group["params"]:
            if param.grad is None:
                continue
            tensors.append(param)
            if has_no_state:
                continue
            state = state_of.get(param)
            if not state or (has_late_momentum and state.get("momentum_buffer") is None):
                return None
            tensors += state.values()
    return tensors


def _planned(tensors: list[Any]) -> list[tuple[BucketPlan, Pointers]] | None:
    """Return a copy plan per dtype; None if a tensor is on another device, not dense, or has no kernel."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = _flat(tensor)
        if flat is None or flat.dtype not in DTYPE_CODES or flat.device != tensors[0].device:
            return None
        by_dtype.setdefault(flat.dtype, []).append(flat)
    planned = []
    for group in by_dtype.values():
        sizes = [-(-flat.numel() // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS for flat in group]
        offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
        plan = BucketPlan(offsets, [flat.numel() for flat in group])
        planned.append((plan, plan.pointers(group)))
    return planned


def _flat(tensor: Any) -> Tensor | None:
    """Return this rank's part of a tensor as a contiguous tensor, or None if this is not possible."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return None
    part: Any = tensor.detach()
    if hasattr(part, "to_local"):
        part = part.to_local()
    if not part.is_contiguous():  # for example channels_last: dense, but with the dimensions in another order
        part = part.permute(sorted(range(part.dim()), key=part.stride, reverse=True))
    return part if part.is_contiguous() else None
