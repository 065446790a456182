"""The one counter: which micro-batch of a window synchronises.

A micro-batch is *handed out* (the loop got it) and later *done* (its backward ran). The backward that
synchronises is the one that brings `done` up to `handed` after the last micro-batch has been handed out; so
several forwards may run before their backwards. A micro-batch without a backward costs the overlap, and never
changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor


def share(num: int, *, rank: int, world_size: int) -> range:
    """Return which of `num` things a rank has: neighbours, and as many as any other rank has, or one more."""
    return range(rank * num // world_size, (rank + 1) * num // world_size)


def share_of_rest(
    all_: Collection[int], done: Collection[int], *, rank: int, world_size: int, run: int = 1
) -> list[int]:
    """Return which places a rank computes when those in `done` are done; a `run`'s belong to one rank."""
    rest = sorted(set(all_) - set(done))
    runs = [list(places) for _, places in groupby(rest, lambda place: place // run)]
    return [place for i in share(len(runs), rank=rank, world_size=world_size) for place in runs[i]]


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
        self._replacement: list[int] = []
        self.index = 0  # windows completed so far; ranks count alike
        self.state = State.IDLE
        self.places: list[int] = []
        self._clear()

    def open(self) -> None:
        self._clear()
        self.state = State.OPEN

    def go_to(self, index: int) -> None:
        """Stand between windows, with so many completed; nothing of an open one is left."""
        self._replacement = []
        self.close(completed=False)
        self.index = index

    def resume(self, places: Sequence[int], due: Sequence[int]) -> None:
        """Open a window in its middle: with micro-batches that are done, and those still due."""
        # If this is dropped, its replacement must not claim micro-batches that other ranks hold.
        self._replacement = [*places, *due][: self.accumulate]
        self.open()
        self.places, self.due, self.done = list(places), list(due), len(places)
        self.num_resumed, self.is_resumed = len(places), True

    def hand_out(self, place: int, *, last: bool) -> None:
        """Count a micro-batch that the loop receives; `last`: the window gets no further one."""
        self.places.append(place)
        self.due = [other for other in self.due if other != place]
        self.is_complete = last

    def pad(self, *, last: bool) -> None:
        """Count a micro-batch that has no place: its backward is awaited like that of others."""
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
        return self.state is State.OPEN and self.handed > self.done

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of the open window are there, and have not been reduced."""
        return self.state is State.SENT or (self.state is State.OPEN and self.done > 0)

    @property
    def is_sent(self) -> bool:
        """Whether the open window's gradients have been sent, whatever has happened to them since."""
        return self.state in (State.SENT, State.REDUCED, State.USED)

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
        return self.state is State.OPEN and self.is_complete and self.done + 1 >= self.handed

    def check_backward(self) -> None:
        if self.state is State.IDLE:
            raise RuntimeError(
                "backward outside a window: iterate `for window in sync.windows(loader): for batch in "
                "window:` or put the micro-batch into `with sync.accumulate():`. In DDP's manner all but a "
                "window's last one stand in `with sync.no_sync():`, or behind "
                "sync.set_requires_gradient_sync(False)"
            )
        if self.is_sent:
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
        # One statement: an interrupt leaves nothing half done.
        self.state, self.is_resumed, self.index = State.IDLE, False, self.index + completed
        if completed:
            self._replacement = []

    def _clear(self) -> None:
        self.places = []  # of the micro-batches handed out in this window, in order
        self.padding = 0  # handed out for the sake of their collectives: an old batch once more
        self.num_resumed = 0  # handed out before the window was resumed
        self.due = list(self._replacement or self.share)  # still to hand out, if the data lasts
        self.done = 0  # backwards run
        self.is_complete = False  # the last micro-batch has been handed out
        self.is_exhausted = False  # the loop has come to the end; backwards may still follow
        self.is_resumed = False  # comes from `resume`, and no loop continues it yet


class Runs:
    """This rank's runs of one window: neighbours by place, as `pe.Exact(slots=...)` cuts the window.

    The public name of a run is slot, which in this package is a parameter's place in a bucket. The gradients
    of a run are added up where autograd adds, and what they have become is accumulated once, so whoever owns
    the gradients notes flags by run, and micro-batches are named here.
    """

    def __init__(self, size: int, *, done: int = 0) -> None:
        self.size = size
        # Whether the last run is half summed: what its micro-batches brought has not been accumulated.
        self.is_open = False
        self._run_of = list(range(done))
        self._num_ended = done

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

    def spread(self, flags: Tensor) -> Tensor:
        """Return flags by micro-batch, `[micro_batches]`, from flags by run, `[runs]`."""
        if self.size == 1:
            return flags
        return flags[torch.tensor(self._run_of, dtype=torch.int64, device=flags.device)]


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
