"""Names the ranks that a collective waits for, and fails the collective if one of them has died.

One thread of each engine looks at the pending collectives of the engine, and sleeps otherwise. Ranks
communicate through the store of their group, because the group itself is what has stalled.
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
    "the store of the process group does not answer, so the process that holds it has died "
    "(rank 0 or the launcher)"
)

_CAN_WARN = ("running", "unknown")  # states of a process that may print the warning
_LOOKS = 6  # before a stall is reported
_LONGEST_TICK_S = 1.0
_HEARTBEAT_S = 5.0  # between two heartbeats of a rank that does not wait


def failure(finding: str, error: object = None) -> str:
    """Return the message of a collective that failed.

    Args:
        finding: the cause.
        error: the error of the backend, if it raised one.
    """
    words = "" if error is None else f" ({error})"
    return f"a collective failed: {finding}. Restart all ranks from a checkpoint{words}"


class StallWatch:
    """Watches the pending collectives of one engine.

    Args:
        store: store of the group of all ranks of the engine.
        rank, ranks: this rank and all ranks, as the default group numbers them.
        after_s: seconds of waiting after which a stall is reported.

    Attributes:
        pending: the collectives under way; the transports add them.
        position: returns a description of where this rank is; the watching thread calls it.
        verdict: error of every collective of this engine from now on; empty if there is none.

    Cost: a thread that wakes up once a second (six times in `after_s`, if that is more often) for about 50 us
    and sends some 300 bytes to the store every five seconds. It ends with `close`, with this object and with
    the interpreter.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], after_s: float) -> None:
        # ---- this rank ----
        self._board, self._rank, self._ranks = Board(store, rank), rank, tuple(ranks)
        self._me = ProcessId.own()
        self._thread = threading.get_ident()  # trains; its line is part of every heartbeat
        self.position: Callable[[], str] = lambda: "making an engine"
        self.pending = Pending()
        self.verdict = ""
        self._promises: dict[int, Promise] = {}  # futures that a verdict ends
        # ---- heartbeats of this rank ----
        self._num_posted, self._posted_at = 0, time.monotonic()
        self._posted: Launch | None = None  # collective that the last heartbeat waits in
        # ---- other ranks ----
        self._known: dict[int, ProcessId] = {}
        self._seen: dict[int, int] = {}  # by rank, the number of its heartbeats when the wait began
        # Ranks found dead at the last look, and in which collective: two looks in a row make a verdict.
        self._suspects: tuple[Launch | None, list[int]] = (None, [])
        # ---- reports ----
        self._after_s = after_s
        self._tick_s = min(after_s / _LOOKS, _LONGEST_TICK_S)
        self._report_at = after_s  # age of a collective at which it is reported next
        stop = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), stop, self._tick_s), name="pyengine-stall", daemon=True
        )
        self._board.announce(self._heartbeat(None))
        self._end = weakref.finalize(self, _end, stop, watcher)  # also before the interpreter ends
        watcher.start()
        _log.debug("start stall watch over ranks %s, report after %g s", self._ranks, after_s)

    def close(self) -> None:
        """End the thread."""
        _log.debug("end stall watch over ranks %s", self._ranks)
        self._end()
        self.pending.clear()

    # ---- called by the thread that trains ----

    def check(self) -> None:
        """Raise RuntimeError if the ranks have a verdict."""
        if self.verdict:
            raise RuntimeError(failure(self.verdict))

    def wait(self, work: Any) -> None:
        """Wait for a collective that the host waits for, or until the ranks have a verdict.

        Args:
            work: its `wait` accepts a timeout, and may be called again after one.
        """
        while not work.is_completed():
            with suppress(RuntimeError):  # a timeout, or a failure that is raised below
                work.wait(timedelta(seconds=self._tick_s))
            self.check()
        work.wait()
        self.pending.oldest()

    def guard(self, future: Future[Any], call_back: Callable[[Future[Any], Any], object]) -> Future[Any]:
        """Return a future that completes as `future` does, or fails with the verdict if that comes first.

        Args:
            future: of a collective.
            call_back: adds a callback to a future.
        """
        promise = Promise()
        self._promises[id(promise)] = promise

        def keep(done: Future[Any]) -> None:
            self_or_none = watch()
            if self_or_none is not None:
                self_or_none._promises.pop(id(promise), None)  # noqa: SLF001 - of this object, if it still exists
            promise.keep(done)

        watch = weakref.ref(self)
        call_back(future, keep)
        if self.verdict:
            promise.break_(RuntimeError(failure(self.verdict)))
        return promise.future

    # ---- called where a collective has failed ----

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have died, as far as this machine can see."""
        if not self._known.keys() >= set(ranks):
            self._read_processes(ranks)
        return [r for r in ranks if r in self._known and self._known[r].state(self._me) == "dead"]

    def waiting(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose last heartbeat waits in a collective."""
        return [rank for rank, beat in self._board.read(ranks).items() if beat.waits]

    def is_decided(self, ranks: Sequence[int]) -> bool:
        """Whether some of the ranks have died, or the ranks have a verdict."""
        return bool(self.dead(ranks) or self._board.verdict())

    def conclude(self, finding: str) -> str:
        """Publish the cause of a failed collective; return the verdict, which the first rank published."""
        self.verdict = self._board.publish(finding)
        _log.debug("collectives of ranks %s fail: %s", self._ranks, self.verdict)
        return self.verdict

    def describe_dead(self, ranks: Sequence[int]) -> str:
        """Return a description of ranks that have died."""
        which = "; ".join(f"rank {rank}: {self._known[rank]}" for rank in ranks)
        return f"{listed(ranks)} of {len(self._ranks)} {'have' if len(ranks) > 1 else 'has'} died ({which})"

    # ---- called by the watching thread ----

    def look(self) -> None:
        """Look at the oldest pending collective once."""
        launch = self.pending.oldest()
        waits = launch is not None and launch.age_s() >= self._tick_s
        self._post_heartbeat(launch if waits else None)
        if launch is None or not waits or self.verdict:
            return
        try:
            self._fail_if_dead(launch)
        except dist.DistNetworkError:
            self._fail(STORE_IS_GONE)
        if not self.verdict and launch.age_s() >= self._report_at:
            self._report(launch)

    def _fail_if_dead(self, launch: Launch) -> None:
        """Fail if another rank has, or if the same awaited ranks are dead at two looks in a row."""
        found = self._board.verdict()
        others = [rank for rank in launch.ranks if rank != self._rank]
        if self._suspects[0] != launch:
            self._read_processes(others)
            self._report_at = self._after_s
        dead = [] if found else self.dead(others)
        if dead and self._suspects == (launch, dead):
            found = self.conclude(self.describe_dead(dead))
        self._suspects = (launch, dead)  # at the first look, data that it had sent may still arrive
        if found:
            self._fail(found)

    def _read_processes(self, ranks: Sequence[int]) -> None:
        """Read the processes of ranks, and the number of heartbeats that each has posted."""
        for rank, beat in self._board.read(ranks).items():
            self._known[rank], self._seen[rank] = beat.process, beat.beat

    def _fail(self, verdict: str) -> None:
        self.verdict = verdict
        _log.debug("collectives of ranks %s fail: %s", self._ranks, verdict)
        for promise in list(self._promises.values()):
            promise.break_(RuntimeError(failure(verdict)))

    def _post_heartbeat(self, launch: Launch | None) -> None:
        """Post a heartbeat if one is due, and at once where this rank begins or ends to wait."""
        now = time.monotonic()
        if launch == self._posted and now - self._posted_at < min(_HEARTBEAT_S, self._after_s / _LOOKS):
            return
        self._posted, self._posted_at = launch, now
        with suppress(dist.DistNetworkError):
            self._board.post(self._heartbeat(launch))

    def _heartbeat(self, launch: Launch | None) -> Heartbeat:
        self._num_posted += 1
        waits = "" if launch is None else launch.what
        launched = {_name(ranks): number for ranks, number in dict(self.pending.launched).items()}
        return Heartbeat(self._me, self._num_posted, self.position(), line_of(self._thread), waits, launched)

    def _report(self, launch: Launch) -> None:
        """Warn, once, unless a lower rank that waits does."""
        beats = self._board.read(launch.ranks)
        states = {rank: beat.process.state(self._me) for rank, beat in beats.items() if beat.waits}
        can_warn = [rank for rank, state in states.items() if state in _CAN_WARN]
        is_first = self._rank == min(can_warn, default=self._rank)
        self._report_at = math.inf if is_first else 2 * launch.age_s()
        if is_first:
            warnings.warn(self._describe(launch, beats), RuntimeWarning, stacklevel=1)

    def _describe(self, launch: Launch, beats: Mapping[int, Heartbeat]) -> str:
        """Return which ranks are missing, where every rank is, and which collective they wait in."""
        name = _name(launch.ranks)
        late = [r for r in launch.ranks if r not in beats or beats[r].launched.get(name, 0) < launch.number]
        came = [rank for rank in launch.ranks if rank not in late]
        waited = f"{listed(came)} {'have' if len(came) > 1 else 'has'} waited for {launch.age_s():.1f} s"
        head = (
            f"{listed(late)} of {len(launch.ranks)} {'have' if len(late) > 1 else 'has'} not launched "
            f"{launch.what}: {waited}"
            if late
            else f"all ranks have launched {launch.what}, and {waited}: the network or a device is slow, or "
            "ranks are in different collectives"
        )
        lines = [self._describe_rank(rank, beats.get(rank)) for rank in [*late[:8], *came[:8]]]
        end = "Training continues once all ranks have launched it; else it fails at the group's timeout"
        return "\n  ".join([f"a sync has stalled: {head}", *lines, end])

    def _describe_rank(self, rank: int, beat: Heartbeat | None) -> str:
        if beat is None:
            return f"rank {rank} has not made this engine: it runs other code, or has died"
        state = beat.process.state(self._me)
        held = {
            "stopped": ", is stopped (SIGSTOP, or a debugger), and was last",
            "dead": ", has died, and was last",
        }.get(state, "")
        if state == "unknown" and beat.beat == self._seen.get(rank):
            held = ", has posted no heartbeat since: it has died, is stopped or disconnected, and was"
        elif state == "running" and beat.beat == self._seen.get(rank):
            held = ", runs and posts no heartbeat: native code holds Python's interpreter, and it was last"
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
        except dist.DistStoreError:  # the store has been removed: the group has ended
            return
        del watch


def _end(stop: threading.Event, watcher: threading.Thread) -> None:
    stop.set()
    if watcher is not threading.current_thread():
        watcher.join(1.0)
