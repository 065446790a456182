"""A rank that waits for others learns in time which of them has not come, and whether it ever will.

One thread an engine looks at what the engine's collectives wait for, and sleeps otherwise. What ranks tell
each other goes through the store of their group, since the group itself is what has stalled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from pyengine.comm.watch.heartbeat import Board, Heartbeat, line_of
from pyengine.comm.watch.pending import Launch, Pending, listed
from pyengine.comm.watch.process_state import ProcessId
from pyengine.comm.watch.promise import Promise

_log = logging.getLogger("pyengine.comm")

STORE_IS_GONE = (
    "the store that the ranks met in does not answer, so the process that keeps it has died "
    "(rank 0 or the launcher)"
)

_SPEAK = ("running", "unknown")
_LOOKS = 6  # before a stall is reported
_LONGEST_TICK_S = 1.0
_BEATS_S = 5.0  # at most so often, unless this rank waits


def failure(finding: str, said: object = None) -> str:
    """Return the message of a collective that failed.

    Args:
        finding: who is the cause.
        said: the backend's own words, if it has said any.
    """
    words = "" if said is None else f" ({said})"
    return f"a collective failed: {finding}. Start all ranks anew, from a checkpoint{words}"


class StallWatch:
    """Watches what the transports of one engine have under way.

    Args:
        store: of the group of all ranks of the engine.
        rank, ranks: this rank, and all of them, of the default group.
        after_s: seconds of waiting after which a stall is reported.

    Attributes:
        pending: what is under way; the transports say it.
        position: tells where this rank is, in words; called by the watching thread.
        verdict: what every collective here is to fail with from now on; empty if nothing.

    Cost: a thread that wakes up once a second (six times in `after_s`, if that is more), for about 50 us, and
    sends some 300 bytes to the store every five seconds. It ends with `close`, with this object and with the
    interpreter.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], after_s: float) -> None:
        self._board, self._rank, self._ranks = Board(store, rank), rank, tuple(ranks)
        self._after_s = after_s
        self._tick_s = min(after_s / _LOOKS, _LONGEST_TICK_S)
        self._thread = threading.get_ident()
        self._me = ProcessId.own()
        self._known: dict[int, ProcessId] = {}
        self._seen: dict[int, int] = {}
        self._suspects: tuple[Launch | None, list[int]] = (None, [])
        self._report_at = after_s
        self._promises: dict[int, Promise] = {}
        self._beat, self._beaten_at = 0, time.monotonic()
        self._told: Launch | None = None
        self.pending = Pending()
        self.position: Callable[[], str] = lambda: "making an engine"
        self.verdict = ""
        stop = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), stop, self._tick_s), name="pyengine-stall", daemon=True
        )
        self._board.announce(self._heartbeat(None))
        self._end = weakref.finalize(self, _end, stop, watcher)  # before the interpreter ends, too
        watcher.start()
        _log.debug("start stall watch over ranks %s, report after %g s", self._ranks, after_s)

    def close(self) -> None:
        """End the thread."""
        _log.debug("end stall watch over ranks %s", self._ranks)
        self._end()
        self.pending.clear()

    def check(self) -> None:
        """Raise RuntimeError if the ranks have a verdict."""
        if self.verdict:
            raise RuntimeError(failure(self.verdict))

    def wait(self, work: Any) -> None:
        """Wait for a collective that the host waits for, or until ranks have a verdict.

        Args:
            work: whose `wait` takes a timeout, and may then be called again.
        """
        while not work.is_completed():
            with suppress(RuntimeError):  # it is over, or not yet; what went wrong is raised below
                work.wait(timedelta(seconds=self._tick_s))
            self.check()
        work.wait()
        self.pending.oldest()

    def guard(self, future: Future[Any], call_back: Callable[[Future[Any], Any], object]) -> Future[Any]:
        """Return a future that ends as another one does, or with a verdict.

        Args:
            future: of a collective.
            call_back: adds a callback to a future.
        """
        promise = Promise()
        self._promises[id(promise)] = promise

        def keep(done: Future[Any]) -> None:
            self_or_none = watch()
            if self_or_none is not None:
                self_or_none._promises.pop(id(promise), None)
            promise.keep(done)

        watch = weakref.ref(self)
        call_back(future, keep)
        if self.verdict:
            promise.break_(RuntimeError(failure(self.verdict)))
        return promise.future

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return which ranks have died, as far as that can be seen from this machine."""
        if not self._known.keys() >= set(ranks):
            self._meet(ranks)
        return [r for r in ranks if r in self._known and self._known[r].state(self._me) == "dead"]

    def waiting(self, ranks: Sequence[int]) -> list[int]:
        """Return which ranks have said last that they wait in a collective."""
        return [rank for rank, beat in self._board.read(ranks).items() if beat.waits]

    def knows(self, ranks: Sequence[int]) -> bool:
        """Whether some of the ranks have died, or all ranks have a verdict."""
        return bool(self.dead(ranks) or self._board.verdict())

    def conclude(self, finding: str) -> str:
        """Return what a collective that has failed here fails with: what the ranks have concluded first."""
        self.verdict = self._board.publish(finding)
        _log.debug("collectives of ranks %s fail: %s", self._ranks, self.verdict)
        return self.verdict

    def of_dead(self, ranks: Sequence[int]) -> str:
        """Say that ranks have died."""
        which = "; ".join(f"rank {rank}: {self._known[rank]}" for rank in ranks)
        return f"{listed(ranks)} of {len(self._ranks)} {'have' if len(ranks) > 1 else 'has'} died ({which})"

    def look(self) -> None:
        """Look once; the watching thread does it."""
        launch = self.pending.oldest()
        waits = launch is not None and launch.age_s() >= self._tick_s
        self._tell(launch if waits else None)
        if launch is None or not waits or self.verdict:
            return
        try:
            self._judge(launch)
        except dist.DistNetworkError:
            self._fail(STORE_IS_GONE)
        if not self.verdict and launch.age_s() >= self._report_at:
            self._report(launch)

    def _judge(self, launch: Launch) -> None:
        """Fail if another rank has, or if one of those waited for is dead and stays so."""
        found = self._board.verdict()
        others = [rank for rank in launch.ranks if rank != self._rank]
        if self._suspects[0] != launch:
            self._meet(others)
            self._report_at = self._after_s
        dead = [] if found else self.dead(others)
        if dead and self._suspects == (launch, dead):
            found = self.conclude(self.of_dead(dead))
        self._suspects = (launch, dead)  # what it had sent may be on its way here
        if found:
            self._fail(found)

    def _meet(self, ranks: Sequence[int]) -> None:
        """Learn the processes of ranks, and how often they have been heard of."""
        for rank, beat in self._board.read(ranks).items():
            self._known[rank], self._seen[rank] = beat.process, beat.beat

    def _fail(self, verdict: str) -> None:
        self.verdict = verdict
        _log.debug("collectives of ranks %s fail: %s", self._ranks, verdict)
        for promise in list(self._promises.values()):
            promise.break_(RuntimeError(failure(verdict)))

    def _tell(self, launch: Launch | None) -> None:
        """Send a heartbeat if one is due, and at once where this rank begins or ends to wait."""
        now = time.monotonic()
        if launch == self._told and now - self._beaten_at < min(_BEATS_S, self._after_s / _LOOKS):
            return
        self._told, self._beaten_at = launch, now
        with suppress(dist.DistNetworkError):
            self._board.post(self._heartbeat(launch))

    def _heartbeat(self, launch: Launch | None) -> Heartbeat:
        self._beat += 1
        waits = "" if launch is None else launch.what
        launched = {_name(ranks): number for ranks, number in dict(self.pending.launched).items()}
        return Heartbeat(self._me, self._beat, self.position(), line_of(self._thread), waits, launched)

    def _report(self, launch: Launch) -> None:
        """Warn, once, unless another rank is to do it."""
        beats = self._board.read(launch.ranks)
        speakers = [r for r, beat in beats.items() if beat.waits and beat.process.state(self._me) in _SPEAK]
        speaks = self._rank == min(speakers, default=self._rank)
        self._report_at = math.inf if speaks else 2 * launch.age_s()
        if speaks:
            warnings.warn(self._described(launch, beats), RuntimeWarning, stacklevel=1)

    def _described(self, launch: Launch, beats: Mapping[int, Heartbeat]) -> str:
        """Say who has not come, where everybody is, and what they wait in."""
        name = _name(launch.ranks)
        late = [r for r in launch.ranks if r not in beats or beats[r].launched.get(name, 0) < launch.number]
        came = [rank for rank in launch.ranks if rank not in late]
        waited = f"{listed(came)} {'have' if len(came) > 1 else 'has'} waited for {launch.age_s():.1f} s"
        head = (
            f"{listed(late)} of {len(launch.ranks)} {'have' if len(late) > 1 else 'has'} not come to "
            f"{launch.what}: {waited}"
            if late
            else f"all ranks have come to {launch.what}, and {waited}: the network or a device is slow, or "
            "ranks are in different collectives"
        )
        lines = [self._of_rank(rank, beats.get(rank)) for rank in [*late[:8], *came[:8]]]
        end = "The run goes on when all have come; else it fails at the process group's timeout"
        return "\n  ".join([f"a sync has stalled: {head}", *lines, end])

    def _of_rank(self, rank: int, beat: Heartbeat | None) -> str:
        if beat is None:
            return f"rank {rank} has not made this engine: it is at something else, or has died"
        state = beat.process.state(self._me)
        held = {
            "stopped": ", is stopped (SIGSTOP, or a debugger), and was last",
            "dead": ", has died, and was last",
        }.get(state, "")
        if state == "unknown" and beat.beat == self._seen.get(rank):
            held = ", has not been heard of since: it has died, is stopped or cut off, and was"
        elif state == "running" and beat.beat == self._seen.get(rank):
            held = ", runs and does not answer: it holds Python's interpreter in native code, and was last"
        waits = f", waits in {beat.waits}" if beat.waits and not held else ""
        return f"rank {rank} ({beat.process}){held}{waits} at {beat.position}: {beat.line}"


def _name(ranks: tuple[int, ...]) -> str:
    """Return a short name of a group, the same on every rank."""
    spelled = ",".join(map(str, ranks))
    return spelled if len(ranks) <= 8 else f"{len(ranks)} of {hash(ranks) & 0xFFFFFFFF:08x}"


def _watch(ref: weakref.ref[StallWatch], stop: threading.Event, tick_s: float) -> None:
    """Look until the watch ends."""
    while not stop.wait(tick_s):
        watch = ref()
        if watch is None:
            return
        try:
            watch.look()
        except dist.DistStoreError:  # it has been removed: the group is over
            return
        del watch


def _end(stop: threading.Event, watcher: threading.Thread) -> None:
    stop.set()
    if watcher is not threading.current_thread():
        watcher.join(1.0)
