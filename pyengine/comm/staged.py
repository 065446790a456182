"""Several collectives, one after the other, as one work: later ones send what is made of what earlier ones
have brought.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.futures import Future

from pyengine.comm.base import Work
from pyengine.ops.device import has_events, recorded_event


def rounds_of(work: Work) -> Iterator[Work]:
    """Yield a work that has started as rounds of another one, the collectives of a staged one each."""
    if not isinstance(work, Staged):
        yield work
        return
    for _ in range(work.rounds_left + 1):
        yield _Round(work)


@runtime_checkable
class BreaksOff(Protocol):
    """A work whose transport can be kept from starting others."""

    def break_off(self, error: Exception) -> None:
        """Note that this rank leaves out collectives that follow this one on the others."""


class _Round:
    """The collective under way of a staged work; behind its end the next one is under way."""

    def __init__(self, work: Staged) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.step()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Future[Any]:
        return self._work.get_future()


class Staged:
    """Collectives that follow each other, and what is left to do behind the last one.

    The first one starts at once; whoever holds this drives it on, by `step` or `wait`. Never from a backend's
    own threads: collectives have to start in the same order on every rank.

    Args:
        rounds: starts a collective whenever it is asked for the next one, which happens once the one before
            has landed. Its end comes behind the last one.
        num_rounds: how many collectives it starts.
        device: where the result lies.

    Attributes:
        rounds_left: collectives still to be started.
    """

    def __init__(self, rounds: Iterator[Work], num_rounds: int, device: torch.device) -> None:
        self._rounds, self._device, self.rounds_left = rounds, device, num_rounds
        self._work: Work | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._event: torch.Event | None = None
        self._future: Future[Any] = Future(devices=[device] if has_events(device) else [])
        self._go_on()

    def step(self) -> None:
        """Wait for the collective under way, and start the next one, or do what is left behind the last.

        Raises:
            Exception: what broke a collective; again each time.
        """
        if self._error is not None:
            raise self._error
        if not self._is_over:
            self._go_on()

    def wait(self) -> None:
        """Run to the end; on an accelerator let the current stream wait for it."""
        while not self._is_over or self._error is not None:
            self.step()
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        is_last = self.rounds_left == 0 and self._work is not None
        return self._is_over or (is_last and self._work is not None and self._work.is_completed())

    def get_future(self) -> Future[Any]:
        """Return a future that completes with `step` or `wait` behind the last collective, or fails there."""
        return self._future

    def break_off(self, error: Exception) -> None:
        """Break off the transport of the collective that has gone, if one has."""
        if isinstance(self._work, BreaksOff):
            self._work.break_off(error)

    def _go_on(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._rounds, None)
        except Exception as error:
            self._error, self._is_over = error, True
            self.break_off(error)
            self._future.set_exception(error)
            raise
        if self._work is not None:
            self.rounds_left -= 1
            return
        self.rounds_left, self._is_over = 0, True
        if has_events(self._device):
            self._event = recorded_event(self._device, enable_timing=False)
        self._future.set_result(None)
