"""What became of the windows that landed, as far as the host has heard."""

from __future__ import annotations

import torch

from pyengine.comm import Transport
from pyengine.header import Totals
from pyengine.host import is_lazy
from pyengine.verdict import Verdict

# On a lazy device, where the host asks for outcomes only if somebody waits for them: how many windows it lets pass.
MAX_UNREAD = 64


class Outcomes:
    """The verdicts of landed windows, in order, each kept until the ranks have concluded it.

    Attributes:
        steps_taken: optimizer steps that changed parameters, as far as all ranks have settled them.
    """

    def __init__(self, comm: Transport, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._last: Verdict | None = None
        self._unread: list[Verdict] = []
        self.steps_taken = self._steps_unsettled = 0

    def add(self, verdict: Verdict) -> None:
        """Take the verdict of a window that has just landed."""
        self._last = verdict
        self._unread.append(verdict)

    def count_step(self) -> None:
        """Count the optimizer step of the window that landed last, unless it turns out to be skipped."""
        assert self._last is not None
        self._last.then(self._count, awaits=False)

    def settle(self) -> None:
        """Learn the outcome of every window that landed; every rank calls this at the same point."""
        self._comm.launch()
        while self._unread:
            self._unread.pop(0).reach()
        self.steps_taken, self._steps_unsettled = self.steps_taken + self._steps_unsettled, 0

    def catch_up(self, window: int) -> None:
        """Hear of earlier windows: of all of them, or on a lazy device, until that is due, what somebody here waits for."""
        if not is_lazy(self._device) or window % MAX_UNREAD == 0:
            self.settle()
        elif any(verdict.is_awaited for verdict in self._unread):
            for verdict in self._unread:
                verdict.read()
            while self._unread and self._unread[0].is_good:
                self._unread.pop(0).reach()

    def announce_more(self) -> bool:
        """Whether some rank said, in the window that landed last, that it has another one; waits for that."""
        return self._last is not None and self._last.read().more > 0

    def _count(self, _: Totals, skips: bool) -> None:
        self._steps_unsettled += not skips
