"""The one counter: which micro-batch of a window synchronises.

A micro-batch is *handed out* (the loop got it) and later *done* (its backward ran). The backward that synchronises is
the one that brings `done` up to `handed` after the last micro-batch has been handed out; so several forwards may run
before their backwards, and a micro-batch without a backward only costs the overlap, never the result.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    IDLE = "no window is open"
    OPEN = "gradients are being accumulated"
    SYNCED = "the window's gradients have been sent"


class Window:
    """Position in the current window of one engine.

    Attributes:
        accumulate: micro-batches a full window, per rank.
        index: windows completed so far; ranks count alike.
        handed: micro-batches handed out in this window.
        done: backwards run in this window.
        is_complete: the last micro-batch of this window has been handed out.
        is_exhausted: the loop has come to the end of this window (backwards may still follow).
    """

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.index = 0
        self.state = State.IDLE
        self.handed = 0
        self.done = 0
        self.is_complete = self.is_exhausted = False

    def open(self) -> None:
        """Begin a window."""
        self.state = State.OPEN
        self.handed = self.done = 0
        self.is_complete = self.is_exhausted = False

    def hand_out(self, *, last: bool) -> None:
        """Count a micro-batch that the loop receives; `last` says that the window gets no further one."""
        self.handed += 1
        self.is_complete = last

    @property
    def next_backward_syncs(self) -> bool:
        """Whether the backward about to run is the window's last."""
        return self.state is State.OPEN and self.is_complete and self.done + 1 >= self.handed

    def count_backward(self) -> int:
        """Count a backward and return its micro-batch index, 0-based."""
        if self.state is State.IDLE:
            raise RuntimeError(
                "backward outside a window: iterate `for window in sync.windows(loader): for batch in window:` or "
                "put the micro-batch into `with sync.accumulate():`"
            )
        if self.state is State.SYNCED:
            raise RuntimeError(
                f"backward after window {self.index} was sent: its gradients are already being reduced. "
                "Call sync.backward once a micro-batch (add up several losses first), and sync.step before the "
                "next window"
            )
        self.done += 1
        return self.done - 1

    def close(self, *, completed: bool) -> None:
        """End the window; only a completed (synchronised) one counts."""
        self.state = State.IDLE
        self.index += completed


def check_accumulate(accumulate: object) -> list[str]:
    """Say what is wrong with a number of micro-batches a window."""
    if isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1:
        return []
    problem = f"accumulate={accumulate!r}: need a whole number of micro-batches a window, 1 or more"
    return [f"{problem}; 1 synchronises after every backward"]
