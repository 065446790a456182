"""The counter of micro-batches, which determines in which backward a window synchronizes.

A micro-batch starts (is *handed out*) when the loop receives it, and is *done* once its backward has run.
After the last micro-batch has started, the window synchronizes in the backward that completes all started
micro-batches. Several forwards may therefore run before their backwards. A micro-batch without a backward
prevents communication from overlapping with the backward, but never changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum


def share(num: int, *, rank: int, world_size: int) -> range:
    """Return a rank's contiguous range of `num` items; the sizes of the ranges differ by at most 1."""
    return range(rank * num // world_size, (rank + 1) * num // world_size)


class State(Enum):
    IDLE = "no window is open"
    OPEN = "gradients are being accumulated"
    SENT = "the window's gradients have been sent"
    REDUCED = "the window's gradients have been reduced"
    USED = "an optimizer has used the window's gradients"


class WindowCounter:
    """The position in the current window of one engine.

    The *place* of a micro-batch is its index among the window's micro-batches of all ranks. From the places,
    other ranks can tell which micro-batches are done.
    """

    def __init__(self, accumulate: int, *, share: Sequence[int] | None = None) -> None:
        self.accumulate = accumulate  # Number of micro-batches in a full window, per rank.
        # This rank's places (micro-batch indices) in a full window. There may be none if there are more ranks
        # than places.
        self.share = range(accumulate) if share is None else share
        self.index = 0  # number of windows completed, the same on every rank
        self.state = State.IDLE
        self.places: list[int] = []
        self.due: list[int] = []
        self._clear()

    def open(self) -> None:
        self._clear()
        self.state = State.OPEN

    def go_to(self, index: int) -> None:
        """Discard any open window, and set the number of completed windows to `index`."""
        self.close(completed=False)
        self.index = index

    def hand_out(self, place: int, *, last: bool) -> None:
        """Count a micro-batch that the loop receives; `last` marks the last micro-batch of the window."""
        self.places.append(place)
        self.due = self.due[1:] if self.due[:1] == [place] else [each for each in self.due if each != place]
        self.is_complete = last

    def pad(self, *, last: bool) -> None:
        """Count a padding micro-batch; its backward must run like any other backward."""
        self.padding += 1
        self.is_complete = last

    @property
    def handed(self) -> int:
        return len(self.places) + self.padding

    @property
    def latest(self) -> int:
        """The place (index) of the last micro-batch that the loop received, or 0."""
        return self.places[-1] if self.places else 0

    @property
    def has_micro_batch_out(self) -> bool:
        return self.state is State.OPEN and len(self.places) + self.padding > self.done

    @property
    def is_accumulating(self) -> bool:
        """Whether the open window has gradients that have not been reduced."""
        return self.state is State.SENT or (self.state is State.OPEN and self.done > 0)

    @property
    def is_sent(self) -> bool:
        """Whether the reduction of the current window's gradients has been launched."""
        return self.state not in (State.IDLE, State.OPEN)

    @property
    def num_sent(self) -> int:
        """Number of windows whose reduction has been launched; equal on every rank."""
        return self.index + self.is_sent

    @property
    def ends(self) -> bool:
        """Whether the window receives no further micro-batches."""
        return self.is_sent or (self.state is State.OPEN and (self.is_complete or self.is_exhausted))

    @property
    def next_backward_syncs(self) -> bool:
        is_last = self.is_complete and self.done + 1 >= len(self.places) + self.padding
        return is_last and self.state is State.OPEN

    def check_backward(self) -> None:
        """Raise RuntimeError if no backward is allowed at this point."""
        if self.state is State.OPEN:
            return
        if self.state is State.IDLE:
            raise RuntimeError(
                "backward outside a window: iterate `for window in sync.windows(loader): for batch in "
                "window:` or put the micro-batch into `with sync.accumulate():`. As with DDP, all "
                "micro-batches except the window's last may instead run inside `with sync.no_sync():`, or "
                "after sync.set_requires_gradient_sync(False)"
            )
        raise RuntimeError(
            f"backward after window {self.index} was sent: put several backwards of one micro-batch into "
            "`with sync.micro_batch():`, or add up their losses and call sync.backward once. (The next "
            "window begins after sync.step)"
        )

    def count_backward(self) -> None:
        """Count a micro-batch whose backward has run."""
        self.check_backward()
        self.done += 1

    def close(self, *, completed: bool) -> None:
        """End the window; `index` increases only for a completed (synchronized) window."""
        self.state = State.IDLE
        self.index += completed

    def _clear(self) -> None:
        self.places = []  # Places of this window's micro-batches so far, in order.
        self.padding = 0  # Number of repeated batches that run only for their collectives.
        self.due = list(self.share)  # Places of the remaining micro-batches, if there is enough data.
        self.done = 0  # Number of backwards that have run.
        self.is_complete = False  # Whether the last micro-batch has started.
        self.is_exhausted = False  # Whether the data has ended; backwards may still follow.


class Slots:
    """The slots ("runs") of this rank in a window: groups of consecutive micro-batches, set by `pe.Exact`.

    The public name of a run is "slot". Elsewhere in this package a slot is the range of a parameter in a
    bucket. Autograd sums the gradients of a run, and the sum is accumulated once. Nonfinite flags are
    therefore recorded per run, and this class maps them to micro-batches.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Whether the last run is incomplete, so that its gradients have not been accumulated.
        self.is_open = False
        self._run_of: list[int] = []
        self._num_ended = 0

    def ends_at(self, place: int) -> bool:
        """Whether the micro-batch at `place`, an index over all ranks, is the last of its run."""
        return (place + 1) % self.size == 0

    def add(self, *, ends: bool) -> None:
        """Count a micro-batch; `ends` marks the last micro-batch of its run."""
        self._run_of.append(self._num_ended)
        self._num_ended += ends
        self.is_open = not ends

    def end(self) -> None:
        self._num_ended += self.is_open
        self.is_open = False

    def blame(self, by_run: Callable[[int], list[int] | None]) -> Callable[[int], list[int] | None]:
        """Return a version of `by_run` that returns micro-batches instead of runs; None stays None."""
        run_of = self._run_of

        def by_micro_batch(param: int) -> list[int] | None:
            runs = by_run(param)
            return None if runs is None else [i for i, run in enumerate(run_of) if run in runs]

        return by_run if self.size == 1 else by_micro_batch


MAX_ACCUMULATE = 2**20  # a limit is needed because a list stores all places


def check_accumulate(accumulate: object) -> list[str]:
    if type(accumulate) is int and 1 <= accumulate <= MAX_ACCUMULATE:
        return []
    kind = "" if type(accumulate) is int else f", got a {type(accumulate).__name__}"
    need = f"accumulate={accumulate!r}: expected micro-batches per window, as an int from 1 to 2**20"
    if isinstance(accumulate, str) and accumulate == "auto":
        how = "give each rank its share of the batch at once: accumulate=1, and sync.retry_smaller(share, fn)"
        return [f"{need}. To find a micro-batch size that fits in memory, {how}"]
    return [f"{need}{kind}; 1 synchronizes after every backward"]
