"""The audit of an engine's windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyengine.audit.auditor import TOLERANCE, Auditor, Counted, Samples
from pyengine.audit.inventory import Inventory, Shard, Subject, buffers_of
from pyengine.audit.probe import Leaves
from pyengine.comm.base import Comm
from pyengine.gradients.base import Reducer
from pyengine.gradients.slots import local
from pyengine.ops.device import send
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import SharedBatch
from pyengine.window.observer import ReducedWindow, WindowObserver


class WindowAudit(WindowObserver):
    """The audit of an engine's windows; created by `sync.audit`."""

    def __init__(
        self,
        reducer: Reducer,
        comm: Comm,
        final: FinalPass,
        batch: SharedBatch | None,
        *,
        every: int,
        module: nn.Module | None,
        end: Callable[[WindowAudit], None],
    ) -> None:
        self._final, self._batch, self._every, self._end = final, batch, every, end
        subjects, comms, leaves = _inventory(reducer, comm, module)
        # The error of an encoded wire is relative to a block or rank, not to an element. Therefore the check
        # accepts any reduced gradient that is equal on all ranks.
        is_lossy = reducer.residuals.wire.is_encoded
        tolerance = math.inf if is_lossy else TOLERANCE
        self._auditor = Auditor(subjects, comms, leaves, tolerance=tolerance, every=every)
        self._world_sizes = [comms[subject.summed or 0].world_size for subject in subjects]
        self._samples: Samples | None = None
        self._window = -1

    def __repr__(self) -> str:
        checks = self._window // self._every + 1
        return f"WindowAudit(every={self._every}, {checks} of {self._window + 1} windows checked)"

    def remove(self) -> None:
        """End the audit.

        Raises:
            AuditError: the last check has found a difference.
        """
        self.release()
        self._end(self)
        self._auditor.conclude()

    def release(self) -> None:
        self._auditor.probe.disarm()

    def keep(self) -> Callable[[], None]:
        return self._auditor.probe.keep()

    def is_due(self, window: int) -> bool:
        return window % self._every == 0

    def has_work_in(self, window: int) -> bool:
        """Whether ranks are compared in this window, or the host reads the result of the previous check."""
        return self.is_due(window) or self.is_due(window - 1)

    def begin(self, window: int) -> None:
        """Begin the check of a window if it is due; otherwise read the result of the last check."""
        self._window, self._samples = window, None
        if not self.is_due(window):
            self._auditor.conclude()
        else:
            self._auditor.begin()

    def step(self, optimizer: Any) -> None:
        """Include the state of an optimizer in later checks."""
        if all(optimizer is not known for known in self._auditor.optimizers):
            self._auditor.optimizers.append(optimizer)

    def sample(self, loss_scale: Callable[[], Tensor | None]) -> None:
        if self.is_due(self._window):
            scale = loss_scale()
            scale = None if scale is None else scale.double()
            self._samples = self._auditor.sample(is_strict=True, scale=scale)

    def check(self, window: ReducedWindow) -> None:
        samples, self._samples = self._samples, None
        if samples is None:
            return
        claimed = window.header.vector()[0]
        total, batch = torch.zeros_like(claimed), self._batch
        if batch is None or batch.is_counting:  # otherwise another rank counts the batch
            for count in window.local.counts:
                total = total + (count.detach().to(claimed) if isinstance(count, Tensor) else float(count))
        world_sizes = send(self._world_sizes, torch.float64, claimed.device)
        counted = Counted(
            counts=claimed / world_sizes,
            count=total.reshape(()),
            claimed=claimed,
            void=self._final.found_inf,
        )
        self._auditor.check(self._window, samples, counted)


def _inventory(
    reducer: Reducer, comm: Comm, module: nn.Module | None
) -> tuple[list[Subject], list[Comm], Leaves]:
    """Return the tensors to compare between ranks, their transports, and the leaves that get gradients."""
    if reducer.model is not None:
        inventory = Inventory(reducer.model, [], group=None, groups={})
        return inventory.subjects, inventory.comms, Leaves(inventory.module)
    known, group_of = reducer.groups_of_params()
    # Only groups that are smaller than the engine's group, and have a parameter on this rank, are listed.
    used = sorted({group for group in group_of if known[group].world_size < comm.world_size})
    comms = [comm, *(known[group] for group in used)]
    place = {group: index for index, group in enumerate(used, start=1)}
    subjects = []
    for name, param, group in zip(reducer.names, reducer.params, group_of, strict=True):
        index = place.get(group, 0)
        shard = Shard(0, local(param).numel(), comms[index].world_size)
        subjects.append(Subject(name, param, index, index if param.requires_grad else None, shard))
    subjects += [] if module is None else buffers_of(module, lambda name: 0)
    return subjects, comms, Leaves(None)
