"""Several collectives in sequence as one work: each sends what is computed from the result before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.futures import Future

from pyengine.comm.base import Comm, Work
from pyengine.ops.device import has_events, recorded_event


def rounds_of(work: Work) -> Iterator[Work]:
    """Split a launched work into rounds of another one: a round for each collective of a staged work."""
    if not isinstance(work, Staged):
        yield work
        return
    for _ in range(work.rounds_left + 1):
        yield _Round(work)


class _Round(Work):
    """The collective under way of a staged work; waiting for it launches the next one."""

    def __init__(self, work: Staged) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.step()

    def is_completed(self) -> bool:
        return self._work.is_completed()


# A step of a staged work that is due: the work, how many steps are left behind it, and its transport.
Step = tuple["Staged", int, Comm]


def next_steps(works: Iterable[tuple[Work, Comm]]) -> list[Step]:
    """Return one step of each staged work that has to be continued, in order.

    Where a stream waits instead of the host, the last step also runs what follows the last collective.
    """
    return [
        (work, work.steps_left - 1, comm)
        for work, comm in works
        if isinstance(work, Staged) and (work.rounds_left or (comm.is_stream_ordered and work.steps_left))
    ]


def run_steps(due: list[Step]) -> None:
    """Run and remove steps, in the order that all ranks have in common.

    An interrupt leaves the steps that have not been run, and no step is run twice.
    """
    while due:
        work, left, comm = due[0]
        with comm.side_stream([]):
            work.step_to(left)
        del due[0]


class Staged:  # a `Work`, and no subclass: `isinstance` of a protocol's subclasses takes ten times as long
    """Collectives in sequence, and the computation after the last one.

    The first collective is launched at once; the holder continues by `step` or `wait`. Never on a thread of
    the backend: collectives have to be launched in the same order on every rank.

    Args:
        rounds: launches the next collective each time it is advanced, which happens once the collective
            before has completed. It ends after the last one.
        num_rounds: number of collectives that it launches; `rounds_left` are not launched yet.
        device: device of the result.
    """

    def __init__(self, rounds: Iterator[Work], num_rounds: int, device: torch.device) -> None:
        self._rounds, self._device, self.rounds_left = rounds, device, num_rounds
        self._work: Work | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._event: torch.Event | None = None
        self._future: Future[Any] = Future(devices=[device] if has_events(device) else [])
        self._advance()

    def step(self) -> None:
        """Wait for the collective under way; launch the next one, or run the computation after the last.

        A collective that has failed raises the same error at every call.
        """
        if self._error is not None:
            raise self._error
        if not self._is_over:
            self._advance()

    @property
    def steps_left(self) -> int:
        """How many calls of `step` have something to do."""
        return 0 if self._is_over else self.rounds_left + 1

    def step_to(self, left: int) -> None:
        """Step once, unless at most `left` steps are left; raises as `step`."""
        if self._error is not None or self.steps_left > left:
            self.step()

    def wait(self) -> None:
        """Run to the end; on an accelerator the current stream waits for it."""
        while not self._is_over or self._error is not None:
            self.step()
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        is_last = self.rounds_left == 0
        return self._is_over or (is_last and self._work is not None and self._work.is_completed())

    def get_future(self) -> Future[Any]:
        """Return a future; the `step` or `wait` after the last collective completes it or sets its error."""
        return self._future

    def _advance(self) -> None:
        before = self._work
        if before is not None:
            try:
                before.wait()  # an interrupt changes nothing: the next step waits again
            except Exception as error:
                self._fail(error, before)
                raise
        try:
            self._work = next(self._rounds, None)
            if self._work is not None:
                self.rounds_left -= 1
                return
            self.rounds_left = 0
            if has_events(self._device):
                self._event = recorded_event(self._device, enable_timing=False)
            self._is_over = True
        except BaseException as error:
            self._fail(error, before)
            raise
        self._future.set_result(None)

    def _fail(self, error: BaseException, work: Work | None) -> None:
        what = f"{error!r} has left a reduction between its collectives"
        self._error = error if isinstance(error, Exception) else RuntimeError(what)  # interrupts come once
        self._is_over = True
        # This rank skips collectives that follow this one on other ranks, so it starts no further one.
        if (break_off := getattr(work, "break_off", None)) is not None:
            break_off(error)
        self._future.set_exception(self._error)
