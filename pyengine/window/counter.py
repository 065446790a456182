"""The one counter: which micro-batch of a window synchronises.

A micro-batch is *handed out* (the loop got it) and later *done* (its backward ran). The window synchronises
in the backward that brings `done` up to `handed` after the last micro-batch has been handed out; so several
forwards may run before their backwards. A micro-batch without a backward costs the overlap, and never changes
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum


def share(num: int, *, rank: int, world_size: int) -> range:
    """Return which of `num` things a rank has: neighbours, and as many as any other rank has, or one more."""
    return range(rank * num // world_size, (rank + 1) * num // world_size)


class State(Enum):
    IDLE = "no window is open"
    OPEN = "gradients are being accumulated"
    SENT = "the window's gradients have been sent"
    REDUCED = "the window's gradients have been reduced"
    USED = "an optimizer has used the window's gradients"


class WindowCounter:
    """Position in the current window of one engine.

    A micro-batch's *place* is its index in the window over all ranks, so that other ranks know which ones are
    done.
    """

    def __init__(self, accumulate: int, *, share: Sequence[int] | None = None) -> None:
        self.accumulate = accumulate  # micro-batches of a full window, per rank
        # This rank's places in it. Empty where there are more ranks than places.
        self.share = range(accumulate) if share is None else share
        self.index = 0  # windows completed so far; ranks count alike
        self.state = State.IDLE
        self.places: list[int] = []
        self.due: list[int] = []
        self._clear()

    def open(self) -> None:
        self._clear()
        self.state = State.OPEN

    def go_to(self, index: int) -> None:
        """Stand between windows, with so many completed; nothing of an open one is left."""
        self.close(completed=False)
        self.index = index

    def hand_out(self, place: int, *, last: bool) -> None:
        """Count a micro-batch that the loop receives; `last`: the window gets no further one."""
        self.places.append(place)
        self.due = self.due[1:] if self.due[:1] == [place] else [each for each in self.due if each != place]
        self.is_complete = last

    def pad(self, *, last: bool) -> None:
        """Count a micro-batch of padding, whose backward is awaited like any other."""
        self.padding += 1
        self.is_complete = last

    @property
    def handed(self) -> int:
        return len(self.places) + self.padding

    @property
    def latest(self) -> int:
        """Place of the micro-batch handed out last; 0 if none was."""
        return self.places[-1] if self.places else 0

    @property
    def has_micro_batch_out(self) -> bool:
        return self.state is State.OPEN and len(self.places) + self.padding > self.done

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of the open window are there, and have not been reduced."""
        return self.state is State.SENT or (self.state is State.OPEN and self.done > 0)

    @property
    def is_sent(self) -> bool:
        """Whether the open window's gradients have been sent, whatever has happened to them since."""
        return self.state not in (State.IDLE, State.OPEN)

    @property
    def num_sent(self) -> int:
        """Windows sent so far, completed or about to be; ranks count alike."""
        return self.index + self.is_sent

    @property
    def ends(self) -> bool:
        """Whether the window gets no further micro-batch."""
        return self.is_sent or (self.state is State.OPEN and (self.is_complete or self.is_exhausted))

    @property
    def next_backward_syncs(self) -> bool:
        is_last = self.is_complete and self.done + 1 >= len(self.places) + self.padding
        return is_last and self.state is State.OPEN

    def check_backward(self) -> None:
        """Raise RuntimeError where no backward may run."""
        if self.state is State.OPEN:
            return
        if self.state is State.IDLE:
            raise RuntimeError(
                "backward outside a window: iterate `for window in sync.windows(loader): for batch in "
                "window:` or put the micro-batch into `with sync.accumulate():`. In DDP's manner all but a "
                "window's last one stand in `with sync.no_sync():`, or behind "
                "sync.set_requires_gradient_sync(False)"
            )
        raise RuntimeError(
            f"backward after window {self.index} was sent: put several backwards of one micro-batch into "
            "`with sync.micro_batch():`, or add their losses up for one sync.backward. (The next window "
            "comes after sync.step)"
        )

    def count_backward(self) -> None:
        """Count a micro-batch as done."""
        self.check_backward()
        self.done += 1

    def close(self, *, completed: bool) -> None:
        """End the window; only a completed (synchronised) one counts."""
        self.state = State.IDLE
        self.index += completed

    def _clear(self) -> None:
        self.places = []  # of the micro-batches handed out in this window, in order
        self.padding = 0  # handed out for the sake of their collectives: an old batch once more
        self.due = list(self.share)  # still to hand out, if the data lasts
        self.done = 0  # backwards run
        self.is_complete = False  # the last micro-batch has been handed out
        self.is_exhausted = False  # the loop has come to the end; backwards may still follow


class Slots:
    """This rank's runs of one window: neighbours by place, as `pe.Exact(slots=...)` cuts the window.

    The public name of a run is slot, which in this package is a parameter's place in a bucket. The gradients
    of a run are added up where autograd adds, and what they have become is accumulated once, so whoever owns
    the gradients notes flags by run, and micro-batches are named here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Whether the last run is half summed: what its micro-batches brought has not been accumulated.
        self.is_open = False
        self._run_of: list[int] = []
        self._num_ended = 0

    def ends_at(self, place: int) -> bool:
        """Whether the micro-batch at a place, counted in the window over all ranks, is its run's last."""
        return (place + 1) % self.size == 0

    def add(self, *, ends: bool) -> None:
        """Count a micro-batch; `ends`: its run is accumulated with it."""
        self._run_of.append(self._num_ended)
        self._num_ended += ends
        self.is_open = not ends

    def end(self) -> None:
        self._num_ended += self.is_open
        self.is_open = False

    def blame(self, by_run: Callable[[int], list[int] | None]) -> Callable[[int], list[int] | None]:
        """Return a function of micro-batches, all of a run, from a function of runs; None stays None."""
        run_of = self._run_of

        def by_micro_batch(param: int) -> list[int] | None:
            runs = by_run(param)
            return None if runs is None else [i for i, run in enumerate(run_of) if run in runs]

        return by_run if self.size == 1 else by_micro_batch


MAX_ACCUMULATE = 2**20  # places are listed


def check_accumulate(accumulate: object) -> list[str]:
    if type(accumulate) is int and 1 <= accumulate <= MAX_ACCUMULATE:
        return []
    kind = "" if type(accumulate) is int else f", and not a {type(accumulate).__name__}"
    need = f"accumulate={accumulate!r}: need a whole number of micro-batches a window, an int from 1 to 2**20"
    if isinstance(accumulate, str) and accumulate == "auto":
        how = "give each rank its share of the batch at once: accumulate=1, and sync.retry_smaller(share, fn)"
        return [f"{need}. To find the micro-batch that fits into memory, {how}"]
    return [f"{need}{kind}; 1 synchronises after every backward"]
