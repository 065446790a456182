"""What belongs to one window of an engine: an object that is made anew for every window."""

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
    """An optimizer that has been stepped with a window."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    done: OptimizerStep  # as ranks compare it
    indices: Collection[int]  # of the parameters that it has stepped


class Window:
    """The state of one window on this rank; `Engine` has the state that outlives it, and all actions."""

    clock: Clock  # from `Engine.begin` on

    def __init__(self, counts: LocalWindow, slots: Slots, traffic: Traffic) -> None:
        # ---- what is accumulated ----
        # Counts and losses, one entry a micro-batch.
        self.counts = counts
        # What has gone wrong on this rank; the header, the reports and the next loop look here.
        self.faults = counts.faults
        # Neighboring micro-batches whose gradients are accumulated once.
        self.slots = slots
        # The totals over which its losses are means, if counts were read ahead.
        self.denominators: Denominators | None = None
        # Whether the sums have been set to zero for it.
        self.has_begun = False
        # Whether a backward has run, as far as that is known.
        self.has_backward = False
        # Whether the micro-batch handed out last is padding: its loss and count are not noted.
        self.is_padding = False
        # Parts of micro-batches that ran out of memory, and ran again.
        self.num_retries = 0

        # ---- what is sent ----
        # Whether another window follows, as far as this rank knows.
        self.has_more = False
        # None until it is launched.
        self.header: Header | None = None
        # Whether its last backward, or its launch, is running.
        self.is_launching = False

        # ---- what has come of it ----
        # The outcome, None until the gradients have been reduced; the host may not know it yet.
        self.verdict: Verdict | None = None
        # The optimizers that have been stepped with it.
        self.stepped: list[Stepped] = []
        # Whether the loss scale has been updated by its outcome.
        self.is_scale_updated = False
        # Collectives and bytes of the engine before it.
        self._collectives, self._bytes_sent = traffic.collectives, traffic.bytes_sent

    def traffic(self, now: Traffic) -> tuple[int, int]:
        """Return the collectives and the bytes that were sent for this window."""
        return now.collectives - self._collectives, now.bytes_sent - self._bytes_sent

    @property
    def is_broken(self) -> bool:
        """Whether an exception left it behind its header, or it was refused: a new loop has to abandon it."""
        return any(fault.kind is not FaultKind.REFUSED for fault in self.faults)
