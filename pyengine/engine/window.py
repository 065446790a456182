"""The state of one window of an engine, in an object that is created for every window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.comm.base import Traffic
from pyengine.step.step_record import Clock
from pyengine.window.counter import Slots
from pyengine.window.denominators import Denominators
from pyengine.window.digest import OptimizerStep
from pyengine.window.faults import FaultKind
from pyengine.window.header import Header, LocalWindow
from pyengine.window.verdict import Verdict


@dataclass(frozen=True)
class Stepped:
    """An optimizer that was stepped with the gradients of a window."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    done: OptimizerStep  # The description of the step that ranks compare.
    indices: Collection[int]  # The indices of the parameters that the optimizer has stepped.


class Window:
    """The state of one window on this rank; `Engine` has the methods and the state that outlives a window."""

    clock: Clock  # set by `Engine.begin`

    def __init__(self, counts: LocalWindow, slots: Slots, traffic: Traffic) -> None:
        # ---- accumulated values ----
        # Counts and losses, with one entry per micro-batch.
        self.counts = counts
        # Errors on this rank, for the header, the error messages and the next loop.
        self.faults = counts.faults
        # The slots: groups of consecutive micro-batches whose gradients are accumulated together.
        self.slots = slots
        # The totals by which the window's losses are divided, if counts were read ahead.
        self.denominators: Denominators | None = None
        # Whether the sums have been set to zero for this window.
        self.has_begun = False
        # Whether a backward is known to have run.
        self.has_backward = False
        # Whether the current micro-batch is padding, whose loss and count are ignored.
        self.is_padding = False
        # The number of retried parts of micro-batches that ran out of memory.
        self.num_retries = 0

        # ---- communication ----
        # Whether this rank expects another window.
        self.has_more = False
        # The header, which sums counts over ranks; None until it is launched.
        self.header: Header | None = None
        # Whether the window's last backward or its reduction is running.
        self.is_launching = False

        # ---- the outcome ----
        # The window's outcome (verdict): whether the gradients may be used. None until the gradients have
        # been reduced. The host may not have read the outcome yet.
        self.verdict: Verdict | None = None
        # The optimizers that were stepped with the gradients of this window.
        self.stepped: list[Stepped] = []
        # Whether the loss scale has been updated from this window's outcome.
        self.is_scale_updated = False
        # The numbers of collectives and bytes that the engine had sent before this window.
        self._collectives, self._bytes_sent = traffic.collectives, traffic.bytes_sent

    def traffic(self, now: Traffic) -> tuple[int, int]:
        """Return the numbers of collectives and bytes that were sent for this window."""
        return now.collectives - self._collectives, now.bytes_sent - self._bytes_sent

    @property
    def is_broken(self) -> bool:
        """Whether the window failed after its header was launched; a new loop then abandons it."""
        return any(fault.kind is not FaultKind.REFUSED for fault in self.faults)
