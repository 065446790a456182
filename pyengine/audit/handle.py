"""`pe.audit`: the audit of a loop without an engine."""

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
        raise TypeError(f"every={every!r} is a {type(every).__name__}: need a whole number of windows")
    if every < 1:
        raise ValueError(f"every={every}: need at least 1, which audits every window")
    return every


def check_device(device: torch.device) -> None:
    """Raise RuntimeError where gradients cannot be read as they arrive."""
    if is_lazy(device):
        raise RuntimeError(
            f"parameters on {device}: gradients of a recorded program cannot be looked at as they come, so "
            "there is no audit on XLA devices; audit the same loop on processors"
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
    """Audit any loop: stock DDP, FSDP2, Accelerate, Megatron's `main_grad`, or one of your own.

    Every `every`-th window, the first among them, all ranks compare what has to be the same on each, and what
    the reduction has left with what the micro-batches brought. A window ends with the (first) optimizer's
    step, and the check runs before it. Every rank calls this behind what wraps the model and makes the
    optimizer, before the first backward.

    Args:
        model: as the loop calls it; wrapped by DDP, sharded by FSDP2, compiled, or plain.
        optimizer: which steps it, or several.
        every: windows from one check to the next.
        process_group: the ranks; None is DDP's, or the default group.
        groups: by a pattern of names (fnmatch), another process group over which parameters are alike and
            their gradients are reduced, for example of experts; None for what ranks do not have in common.
        tolerance: how far a reduced gradient may be off, relative to what the micro-batches brought. A lossy
            communication hook wants more than 1/32.

    Returns:
        A handle: `reduced`, `count` and `abandon` report what hooks cannot see, `remove` ends the audit.

    Raises:
        TypeError, ValueError: an argument is off, or ranks have other parameters; on every rank.
        RuntimeError: the parameters are on an XLA device. At a step: a rank has left out its own.
        AuditError: on every rank, before the optimizer's step (on an accelerator behind it): what differs.

    Cost: of a checked window a read of the parameters, a native hook a parameter and micro-batch, and an
    all-reduce of 160 bytes a parameter; of others a hook of the step. Over gloo a process group. Memory: 140
    bytes a parameter, 4 KB, or on an accelerator 170 KB or 1/64 byte an element.

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
        raise TypeError(f"model is a {type(model).__name__}: need the module that the loop calls")
    optimizers = _innermost_of(optimizer)
    if not 0 <= tolerance:
        raise ValueError(f"tolerance={tolerance}: need a share of at least 0 of what micro-batches bring")
    check_device(next(model.parameters()).device)
    inventory = Inventory(model, optimizers, group=process_group, groups=groups or {})
    leaves, every = Leaves(inventory.module), check_every(every)
    auditor = Auditor(inventory.subjects, inventory.comms, leaves, tolerance=tolerance, every=every)
    # A sharded optimizer keeps state of other parameters on every rank.
    auditor.optimizers = [item for item in optimizers if not hasattr(item, "consolidate_state_dict")]
    return Audit(auditor, inventory.subjects, optimizers[0], every=every)


def _innermost_of(optimizer: Any) -> list[Any]:
    """Return the innermost optimizer, since those of Accelerate and Lightning wrap another one; or raise."""
    found = []
    for item in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        while isinstance(inner := getattr(item, "optimizer", None), torch.optim.Optimizer):
            item = inner
        if not (hasattr(item, "param_groups") and hasattr(item, "register_step_pre_hook")):
            raise TypeError(f"optimizer is a {type(item).__name__}: need a torch.optim.Optimizer, or several")
        found.append(item)
    return found


class Audit:
    """An audit under way; made by `pe.audit`.

    Attributes:
        step: windows that have ended.
    """

    def __init__(self, auditor: Auditor, subjects: Sequence[Subject], optimizer: Any, *, every: int) -> None:
        self._auditor, self._every = auditor, every
        self._names = [subject.name for subject in subjects]
        self.step = 0
        self._reduced: tuple[Samples, Counted] | None = None  # what was found when `reduced` was called
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
        """Set, before a micro-batch's backward, what its loss is summed over.

        The gradient of a window in which this was called has to be the sum of the losses' gradients over the
        sum of all items, over all ranks and micro-batches; else it has to be the mean over ranks.

        Args:
            items: that the loss is summed over: tokens, samples; a 0-dim tensor is not read.
            divided_by: what the loop has divided their sum by already.
            names: a pattern (fnmatch) of the parameters that this is for, where a loss of its own alone
                reaches them: a second head's. Call it for all first.
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
        """Report that the window's gradients have been reduced, and not changed since.

        Call it behind the window's last backward, before gradients are unscaled or clipped: what each is
        divided by is then checked. Without it one factor common to all gradients counts as clipping.
        """
        if self._is_due:
            self._reduced = self._sample(is_strict=True)

    def abandon(self) -> None:
        """Forget the window: its step was skipped, and `reduced` was not called.

        Where gradients become None (`zero_grad()`) that is noticed, and where they are zeroed in place it is
        not.
        """
        self._forget()
        if self._is_due:
            self._auditor.begin()

    def remove(self) -> None:
        """Remove all hooks.

        Raises:
            AuditError: what the last check has found.
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
                    f"audit: not every rank has come to optimizer.step() of window {self.step}, where each "
                    "waits for the others: where one rank leaves out a step, let all of them leave it out: "
                    f"{error}"
                ) from error

    def _after_step(self, *_: Any) -> None:
        self.step += 1
        self._forget()
        if self._is_due:
            self._auditor.begin()

    def _sample(self, *, is_strict: bool) -> tuple[Samples, Counted]:
        """Return what the gradients are, and what was counted, by subject."""
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
