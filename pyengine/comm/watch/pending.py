"""Collectives that this rank has launched and that have not completed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One collective.

    Attributes:
        ranks: participating ranks, as the default group numbers them.
        number: number of the collective among those of the same ranks, from 1; the same on every rank.
        what: description of the collective.
        since: time of the launch on this rank, on the monotonic clock, in seconds.
        is_done: returns whether it has completed on this rank; called by any thread.
    """

    ranks: tuple[int, ...]
    number: int
    what: str
    since: float
    is_done: Callable[[], bool]

    def age_s(self) -> float:
        """Return the seconds since the launch."""
        return time.monotonic() - self.since


class Pending:
    """Collectives under way of one engine's transports; one thread launches, others may read.

    Attributes:
        launched: number of collectives launched on this rank, by participating ranks.
    """

    def __init__(self) -> None:
        self.launched: dict[tuple[int, ...], int] = {}
        self._open: dict[int, Launch] = {}
        self._tickets = itertools.count()

    def add(self, ranks: tuple[int, ...], what: str, is_done: Callable[[], bool]) -> int:
        """Add a collective that was launched; return a ticket for `remove`."""
        self.oldest()
        self.launched[ranks] = number = self.launched.get(ranks, 0) + 1
        ticket = next(self._tickets)
        self._open[ticket] = Launch(ranks, number, what, time.monotonic(), is_done)
        return ticket

    def remove(self, ticket: int) -> None:
        """Remove a collective, unless it was removed before."""
        self._open.pop(ticket, None)

    @contextmanager
    def running(self, ranks: tuple[int, ...], what: str) -> Iterator[None]:
        """Add a collective that the body launches and waits for."""
        ticket = self.add(ranks, what, lambda: False)
        try:
            yield
        finally:
            self.remove(ticket)

    def oldest(self) -> Launch | None:
        """Return the oldest collective under way; remove those that have completed."""
        for ticket, launch in list(self._open.items()):
            if not launch.is_done():
                return launch
            self.remove(ticket)
        return None

    def clear(self) -> None:
        """Remove all."""
        self._open.clear()


def listed(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 1", "ranks 0, 2", "ranks 0, 1, 2 and 97 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
