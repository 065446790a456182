"""The public object for one micro-batch of a window, valid while its backwards run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pyengine.engine.backward import checked_backward
from pyengine.engine.loss_checks import LossChecks
from pyengine.engine.window import Window
from pyengine.ops.device import HOST
from pyengine.step.grad_scaler import GradScaler
from pyengine.window.counter import WindowCounter
from pyengine.window.header import Count, LocalWindow, checked_count


class MicroBatch:
    """One micro-batch of a window, while its backwards run; created by `sync.micro_batch`.

    The gradient of the micro-batch is the sum of the gradients of all backwards in the block. A block without
    a backward contributes a zero gradient, but the micro-batch's count is still added.
    """

    def __init__(
        self,
        window: Window,
        counter: WindowCounter,
        count: Count,
        loss: Tensor | None,
        *,
        is_stated: bool,
        scaler: GradScaler | None,
        loss_checks: LossChecks,
        last_backward: Callable[[MicroBatch, Sequence[Tensor]], AbstractContextManager[None]],
    ) -> None:
        counter.check_backward()
        self._window, self._scaler, self._checks = window, scaler, loss_checks
        self._last_backward = last_backward
        # `index`: the index among this rank's micro-batches. `syncs`: whether this is the window's last.
        self.index, self.syncs = counter.done, counter.next_backward_syncs
        # Whether this micro-batch is the last of its slot (or padding), so that the gradients in `.grad` are
        # added to the window's sum after it.
        self.ends_slot = self.syncs or window.is_padding or window.slots.ends_at(counter.latest)
        self._count: Count = count
        self.is_stated = is_stated or window.denominators is not None
        self._loss: Tensor | None = None if loss is None else loss.detach()
        # `has_last`: whether a backward was marked as the last. `has_only`: whether only the engine's code
        # runs in the block.
        self.has_last = self.has_only = False

    @property
    def count(self) -> Count:
        """Number of items in the losses: a number or a 0-dim tensor.

        May be set until the last backward begins.
        """
        return self._count

    @count.setter
    def count(self, count: Count) -> None:
        self._check_open("count")
        if self._window.denominators is not None:
            raise ValueError(
                "mb.count: this window's counts were read ahead by sync.windows(loader, count=...); do not "
                "set it"
            )
        self._count, self.is_stated = checked_count(count), True

    @property
    def loss(self) -> Tensor | None:
        """Sum of the losses for the `StepRecord`: a 0-dim tensor, or None.

        May be set until the last backward begins. The stored loss is detached. If any micro-batch of a window
        has no loss, the loss in the record is None.
        """
        return self._loss

    @loss.setter
    def loss(self, loss: Tensor | float | None) -> None:
        self._check_open("loss")
        if loss is None or isinstance(loss, Tensor):
            value = loss
        elif isinstance(loss, int | float) and not isinstance(loss, bool):
            value = torch.tensor(loss, dtype=torch.float64, device=HOST)
        else:
            raise TypeError(f"mb.loss is a {type(loss).__name__}: expected a 0-dim tensor, a number or None")
        if value is not None and value.dim() != 0:
            raise ValueError(
                f"mb.loss has shape {list(value.shape)}, expected a 0-dim tensor: use loss.sum()"
            )
        self._loss = None if value is None else value.detach()
        self._window.has_backward |= value is not None

    def add_to(self, counts: LocalWindow) -> None:
        """Add the count and the loss of this micro-batch to the record of a window."""
        counts.append(self._loss, self._count)

    def backward(
        self,
        loss: Tensor,
        *,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Run one of the block's backwards, on the scaled loss if `sync.scaler` is set.

        Equivalent to `loss.backward(...)`, or to `sync.scaler.scale(loss).backward(...)` with a scaler, for
        code that must work with and without a scaler.

        Args:
            loss: a 0-dim tensor, or a tensor of the shape of `gradient`. This call does not set the
                micro-batch's `count` and `loss`.
            gradient, retain_graph, create_graph, inputs: as in `torch.Tensor.backward`.

        Raises:
            ValueError: the loss or an argument is invalid; no backward has run.
        """
        run = checked_backward(
            loss, gradient=gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )
        scaler = self._scaler
        self._checks.refuse_scaled(loss, scaler)
        self._checks.warn_of_division(loss, self._count if self.is_stated else None)
        self._window.has_backward = True
        run(loss if scaler is None else scaler.scale(loss))

    def last_backward(self, *roots: Tensor) -> AbstractContextManager[None]:
        """Mark the backward in the body as the last backward of the block.

        In the window's last micro-batch, the window's counts are sent before the body, and the reduction of
        each bucket is launched as soon as the body has completed the bucket. In an earlier micro-batch,
        gradients are accumulated during the backward, while they are still in the cache. Therefore set
        `count` and `loss` before this call; no gradient may arrive after the body.

        Args:
            roots: the tensors from which the body's backward starts (the scaled losses, or any tensors with
                the same graph). Without `roots` there is no overlap in the engine's first window.

        Raises:
            RuntimeError: a backward of the block was already marked, or a gradient arrived a second time,
                when its bucket may already have been sent.
        """
        if self.has_last:
            raise RuntimeError(
                "mb.last_backward was called a second time in this micro-batch, whose gradients have been "
                "accumulated: mark the last backward only"
            )
        for root in roots:
            if root.dim() == 0:
                self._checks.warn_of_division(root, self._count if self.is_stated else None)
        return self._last_backward(self, roots)

    def _check_open(self, what: str) -> None:
        if self.has_last:
            raise RuntimeError(
                f"mb.{what} is set after the last backward has begun, when the header may already have been "
                "sent: set it before"
            )
