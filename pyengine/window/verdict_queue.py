"""Verdicts on reduced windows, until the host has read them and the ranks have concluded them."""

from __future__ import annotations

import torch

from pyengine.comm.base import Comm
from pyengine.ops.device import flush, is_lazy
from pyengine.window.claims import Use
from pyengine.window.header import Totals
from pyengine.window.verdict import Verdict

# On a lazy device, where the host reads outcomes only if an action waits for them: after how many windows it
# reads them anyway.
MAX_UNREAD = 64
# Steps skipped in a row.
_WARN_AT = {10**power for power in range(1, 12)}


class VerdictQueue:
    """The verdicts of reduced windows, in order, each kept until the ranks have concluded it."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._last: Verdict | None = None
        self._before: Verdict | None = None  # that of the last window that was not refused, until it is known
        self._unread: list[Verdict] = []
        # Optimizer steps that changed parameters, as far as all ranks have reached the verdicts.
        self.steps_taken = self._new_steps = 0
        self._skipped = 0  # windows in a row, as far as they are reached
        self._has_warned = False

    def append(self, verdict: Verdict) -> None:
        """Append the verdict on a window that has just been reduced. A refused window has no use that ranks
        could compare, also if the refusal is known only later.
        """
        self._before, self._last = self._last_of_all_ranks(), verdict
        self._unread.append(verdict)

    def count_step(self) -> None:
        """Count the optimizer step of the window that was reduced last, unless it turns out to be skipped."""
        assert self._last is not None
        self._last.then(self._count, awaits=False)

    def reach_all(self) -> None:
        """Reach every verdict; every rank calls this at the same point. Raises as `Verdict.reach`."""
        flush(self._device)
        while self._unread:
            self._reach_next()
        self._last, self._before = self._last_of_all_ranks(), None
        self.steps_taken, self._new_steps = self.steps_taken + self._new_steps, 0

    def reach_earlier(self, window: int) -> None:
        """Reach the verdicts on earlier windows: all; on a lazy device, until those are due, what is awaited
        here.
        """
        if not is_lazy(self._device) or window % MAX_UNREAD == 0:
            self.reach_all()
        elif any(verdict.is_awaited for verdict in self._unread):
            for verdict in self._unread:
                verdict.read()
            while self._unread and self._unread[0].is_quiet:
                self._reach_next()

    def last_use(self) -> Use:
        """Return what this rank did with the window before, if that was good; nothing on a lazy device.

        After `reach_earlier`, so that all ranks know alike whether it was.
        """
        last = self._last_of_all_ranks()
        return last.use if last is not None and last.is_good and not is_lazy(self._device) else Use()

    def restart(self, steps_taken: int) -> None:
        """Start after so many optimizer steps; verdicts on earlier windows belong to another run."""
        self.steps_taken, self._last, self._before, self._skipped = steps_taken, None, None, 0

    def read_all(self) -> None:
        """Read what this rank knows alone of every reduced window: schedulers step, no collective follows."""
        for verdict in self._unread:
            verdict.read()

    def some_rank_has_more(self) -> bool:
        """Whether some rank has a window after the one reduced last: alike on every rank; waits for its
        header.
        """
        last = self._last_of_all_ranks()
        return last is not None and last.read().more > 0

    def _reach_next(self) -> None:
        """Reach the earliest verdict, and warn of skipped steps: the first one, unless a loss scale may have
        caused it, and the 10th, 100th, ... in a row.
        """
        verdict = self._unread.pop(0)
        verdict.reach()
        self._skipped = self._skipped + 1 if verdict.is_skipped else 0
        is_first = verdict.is_skipped and not (self._has_warned or verdict.is_scaled)
        if is_first or self._skipped in _WARN_AT:
            verdict.warn_of_skip(self._skipped)
            self._has_warned = True

    def _last_of_all_ranks(self) -> Verdict | None:
        """Return the verdict on the last window that is not known to have been refused."""
        return self._before if self._last is not None and self._last.was_refused else self._last

    def _count(self, _: Totals, skips: bool) -> None:
        self._new_steps += not skips
