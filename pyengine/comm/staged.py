"""A sequence of collectives that is used like a single `Work`.

Each collective sends a result of the previous collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.futures import Future

from pyengine.comm.base import Work
from pyengine.ops.device import has_events, recorded_event


class Staged:  # not a `Work`, because `isinstance` with a protocol is ten times slower
    """A sequence of collectives, followed by a final computation.

    The first collective is launched immediately; the caller launches the next collectives by calling `step`
    or `wait`. Do not call `step` or `wait` from a thread of the backend, because every rank must launch
    collectives in the same order.

    Args:
        rounds: iterator that launches the next collective each time it is advanced. It is advanced when the
            previous collective has completed, and ends after the last collective.
        num_rounds: number of collectives in `rounds`. The attribute `rounds_left` counts the collectives that
            have not been launched yet.
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
        """Wait for the current collective, then launch the next collective or run the final computation.

        After a collective has failed, every call raises the same error.
        """
        if self._error is not None:
            raise self._error
        if not self._is_over:
            self._advance()

    def wait(self) -> None:
        """Run all remaining steps; on an accelerator the current stream waits for the result."""
        while not self._is_over or self._error is not None:
            self.step()
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        is_last = self.rounds_left == 0
        return self._is_over or (is_last and self._work is not None and self._work.is_completed())

    def get_future(self) -> Future[Any]:
        """Return a future; `step` or `wait` sets its result or its exception after the last collective."""
        return self._future

    def _advance(self) -> None:
        before = self._work
        try:
            if before is not None:
                before.wait()
            self._work = next(self._rounds, None)
        except BaseException as error:
            self._is_over = True
            if isinstance(error, Exception):
                self._error = error
            # This rank skips the remaining collectives, which other ranks launch, so it must not start any
            # other collective.
            if (break_off := getattr(before, "break_off", None)) is not None:
                break_off(error)
                if self._error is None:  # an interrupt is raised once, but the error persists
                    self._error = RuntimeError(f"{error!r} interrupted a reduction between two collectives")
            if self._error is not None:
                self._future.set_exception(self._error)
            raise
        if self._work is not None:
            self.rounds_left -= 1
            return
        self.rounds_left, self._is_over = 0, True
        if has_events(self._device):
            self._event = recorded_event(self._device, enable_timing=False)
        self._future.set_result(None)
