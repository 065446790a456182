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
        ranks: that take part, of the default group.
        number: which of them it is, from 1; ranks count alike.
        what: it is, in words.
        since: when it was launched here, on the monotonic clock, in seconds.
        is_done: tells whether it has completed here; called by any thread.
    """

    ranks: tuple[int, ...]
    number: int
    what: str
    since: float
    is_done: Callable[[], bool]

    def age_s(self) -> float:
        """Return for how many seconds it has been under way."""
        return time.monotonic() - self.since


class Pending:
    """What one engine's transports have under way; one thread launches, others may look.

    Attributes:
        launched: by ranks that take part, how many collectives were launched here.
    """

    def __init__(self) -> None:
        self.launched: dict[tuple[int, ...], int] = {}
        self._open: dict[int, Launch] = {}
        self._tickets = itertools.count()

    def add(self, ranks: tuple[int, ...], what: str, is_done: Callable[[], bool]) -> int:
        """Note that a collective was launched; return a ticket for `remove`."""
        self.oldest()
        self.launched[ranks] = number = self.launched.get(ranks, 0) + 1
        ticket = next(self._tickets)
        self._open[ticket] = Launch(ranks, number, what, time.monotonic(), is_done)
        return ticket

    def remove(self, ticket: int) -> None:
        """Forget a collective, if that has not happened."""
        self._open.pop(ticket, None)

    @contextmanager
    def running(self, ranks: tuple[int, ...], what: str) -> Iterator[None]:
        """Note a collective that the body launches and waits for."""
        ticket = self.add(ranks, what, lambda: False)
        try:
            yield
        finally:
            self.remove(ticket)

    def oldest(self) -> Launch | None:
        """Return the collective that has been under way for longest, and forget those that are not."""
        for ticket, launch in list(self._open.items()):
            if not launch.is_done():
                return launch
            self.remove(ticket)
        return None

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0, 2", "ranks 0, 1, 2 and 97 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
