"""`pe.audit`: audits of training loops without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyengine.audit.auditor import TOLERANCE, AuditError, Auditor, Counted, Samples
from pyengine.audit.inventory import Groups, Inventory, Subject
from pyengine.audit.probe import Leaves
from pyengine.ops.device import is_lazy

if TYPE_CHECKING:
    from typing_extensions import Self


def check_every(every: object) -> int:
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"every={every!r} is a {type(every).__name__}; expected a whole number of windows")
    if every < 1:
        raise ValueError(f"every={every}: expected at least 1, which audits every window")
    return every


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if gradients on `device` cannot be read when they arrive."""
    if is_lazy(device):
        raise RuntimeError(
            f"parameters on {device}: gradients of a recorded program cannot be read when they arrive, so "
            "there is no audit on XLA devices; audit the same loop on a CPU"
        )


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    every: int = 100,
    process_group: dist.ProcessGroup | None = None,
    groups: Groups | None = None,
    tolerance: float = TOLERANCE,
) -> Audit:
    """Audit any training loop: DDP, FSDP2, Accelerate, Megatron's `main_grad`, or your own loop.

    Once every `every` windows, starting with the first, ranks check that they agree on all values that must
    be equal, and that the reduced gradients match the gradients of the micro-batches. A window ends with
    the step of the (first) optimizer, and the check runs just before the step. Call this function on every
    rank after wrapping the model and creating the optimizer, and before the first backward.

    Args:
        model: the model as the loop calls it: wrapped in DDP, sharded by FSDP2, compiled, or plain.
        optimizer: the optimizer that steps the model, or several optimizers.
        every: number of windows from one check to the next.
        process_group: the group of ranks; None means DDP's group, or the default group.
        groups: maps patterns of parameter names (fnmatch) to the process group that shares the parameters and
            reduces their gradients, for example for experts. None excludes parameters that ranks do not have
            in common.
        tolerance: largest error of a reduced gradient, relative to the gradients of the micro-batches. A
            lossy communication hook needs more than 1/32.

    Returns:
        A handle. Call `reduced`, `count` and `abandon` to report events that hooks cannot detect, and
        `remove` to end the audit.

    Raises:
        TypeError, ValueError: an argument is invalid, or ranks have different parameters; raised on every
            rank.
        RuntimeError: the parameters are on an XLA device; or, at a step, another rank skipped its step.
        AuditError: a check found a difference; raised on every rank, before the optimizer's step on a CPU and
            after the step on an accelerator.

    Cost: a checked window needs one read of the parameters, one native hook call per parameter and
    micro-batch, and an all-reduce of 160 bytes per parameter; other windows need one hook call per step. Over
    gloo, a process group is created. The audit needs 140 bytes of memory per parameter. In addition, it needs
    4 KB on a CPU, or 170 KB on an accelerator (at most 1/64 byte per element from 11 M elements on).

    Example:
        >>> watch = pe.audit(ddp_model, optimizer, every=100)  # doctest: +SKIP
        >>> for micro_batches in windows:  # doctest: +SKIP
        ...     for x, y in micro_batches:
        ...         (loss(ddp_model(x), y) / len(micro_batches)).backward()
        ...     watch.reduced()  # before clipping and unscaling
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected the module that the loop calls")
    optimizers = _innermost_of(optimizer)
    if not 0 <= tolerance:
        raise ValueError(f"tolerance={tolerance}: expected a relative error, at least 0")
    check_device(next(model.parameters()).device)
    inventory = Inventory(model, optimizers, group=process_group, groups=groups or {})
    leaves, every = Leaves(inventory.module), check_every(every)
    auditor = Auditor(inventory.subjects, inventory.comms, leaves, tolerance=tolerance, every=every)
    # A sharded optimizer has the state of different parameters on each rank.
    auditor.optimizers = [item for item in optimizers if not hasattr(item, "consolidate_state_dict")]
    return Audit(auditor, inventory.subjects, optimizers[0], every=every)


def _innermost_of(optimizer: Any) -> list[Any]:
    """Return the optimizers inside the wrappers of Accelerate and Lightning, or raise TypeError."""
    found = []
    for item in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        while isinstance(inner := getattr(item, "optimizer", None), torch.optim.Optimizer):
            item = inner
        if not (hasattr(item, "param_groups") and hasattr(item, "register_step_pre_hook")):
            raise TypeError(
                f"optimizer is a {type(item).__name__}; expected a torch.optim.Optimizer or a list of them"
            )
        found.append(item)
    return found


class Audit:
    """A running audit; created by `pe.audit`.

    Attributes:
        step: number of windows that have ended.
    """

    def __init__(self, auditor: Auditor, subjects: Sequence[Subject], optimizer: Any, *, every: int) -> None:
        self._auditor, self._every = auditor, every
        self._names = [subject.name for subject in subjects]
        self.step = 0
        self._reduced: tuple[Samples, Counted] | None = None  # the result of the last call to `reduced`
        self._forget()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        auditor.begin()

    def __repr__(self) -> str:
        checks = f"{-(-self.step // self._every)} of {self.step} windows checked"
        return f"Audit({len(self._names)} tensors, every={self._every}, {checks})"

    def count(self, items: float | Tensor, *, divided_by: float = 1.0, names: str = "*") -> None:
        """Set the number of items over which a micro-batch's loss is summed; call this before its backward.

        In a window with item counts, the gradient must be the sum of the losses' gradients divided by the sum
        of all items, over all ranks and micro-batches. In a window without item counts, the gradient must be
        the mean over ranks.

        Args:
            items: number of items, such as tokens or samples; the host does not read a 0-dim tensor.
            divided_by: divisor that the loop has already applied to the sum.
            names: pattern (fnmatch) of parameter names to which the count applies. If some parameters are
                reached only by a separate loss, such as that of a second head, first call `count` for all
                parameters, and then with a pattern for these parameters.
        """
        if not self._is_due:
            return
        device = self._auditor.device
        added = items.detach().to(device).double() if isinstance(items, Tensor) else float(items)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._counts[names] = self._counts.get(names, zero) + added
        weights = self._auditor.probe.weights_of_next()
        for index, name in enumerate(self._names):
            if fnmatchcase(name, names):
                weights[index], self._pattern[index] = float(divided_by), names

    def reduced(self) -> None:
        """Report that the gradients of the window have been reduced and not changed since.

        Call this after the window's last backward, before gradients are unscaled or clipped, so that the
        divisor of each gradient is checked. Without this call the audit assumes that a factor common to all
        gradients comes from clipping.
        """
        if self._is_due:
            self._reduced = self._sample(is_strict=True)

    def abandon(self) -> None:
        """Discard the window, because its step was skipped and `reduced` was not called.

        A skipped step is detected without this call if gradients are set to None (`zero_grad()`), but not if
        they are zeroed in place.
        """
        self._forget()
        if self._is_due:
            self._auditor.begin()

    def remove(self) -> None:
        """Remove all hooks.

        Raises:
            AuditError: the last check found a difference.
        """
        self._remove_hooks()
        self._auditor.conclude()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        if kind is None:
            self._auditor.conclude()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._auditor.probe.disarm()

    @property
    def _is_due(self) -> bool:
        return self.step % self._every == 0

    def _before_step(self, *_: Any) -> None:
        if self._is_due:
            now = self._reduced or self._sample(is_strict=False)
            try:
                self._auditor.check(self.step, *now)
            except AuditError:
                raise
            except RuntimeError as error:
                raise RuntimeError(
                    f"audit: not every rank has reached optimizer.step() of window {self.step}, where ranks "
                    "wait for each other; if one rank leaves out a step, all ranks must leave it out: "
                    f"{error}"
                ) from error

    def _after_step(self, *_: Any) -> None:
        self.step += 1
        self._forget()
        if self._is_due:
            self._auditor.begin()

    def _sample(self, *, is_strict: bool) -> tuple[Samples, Counted]:
        """Return samples of the reduced gradients, and the item counts by audited tensor."""
        samples, counted = self._auditor.sample(is_strict=is_strict), Counted()
        if self._counts:
            zero = torch.zeros((), dtype=torch.float64, device=self._auditor.device)
            counts = [self._counts.get(name, zero) for name in self._pattern]
            counted = Counted(counts=torch.stack(counts))
        return samples, counted

    def _forget(self) -> None:
        self._reduced = None
        self._counts: dict[str, Tensor] = {}
        self._pattern = [""] * len(self._names)
