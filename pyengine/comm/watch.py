"""Detection of stalled collectives: which ranks are missing, what code they run, and whether they died.

Each engine has a thread that checks the engine's pending collectives periodically, and otherwise sleeps.
Ranks communicate through the store of their process group, because the group itself has stalled.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.futures import Future

from pyengine.comm.groups import group_or_default
from pyengine.comm.process_state import ProcessId
from pyengine.ops.trace import find_caller

_log = logging.getLogger("pyengine.comm")

STORE_IS_GONE = (
    "the store of the process group does not answer, so the process that holds it has died "
    "(rank 0 or the launcher)"
)

# The time to wait for the responses of other ranks after a failure. Ranks that wait in the same collective
# fail within milliseconds of each other, or at the same timeout.
WAIT_S = 2.0
# A store that does not respond within this time is considered unavailable.
_STORE_TIMEOUT = timedelta(seconds=5)

_CAN_WARN = ("running", "unknown")  # States in which a process can print the warning.
_LOOKS = 6  # Number of checks before a stall warning.
_LONGEST_TICK_S = 1.0
_HEARTBEAT_S = 5.0  # longest interval between heartbeats


# ---- pending collectives of this rank ----


@dataclass(frozen=True)
class Launch:
    ranks: tuple[int, ...]  # Participating ranks, as the default group numbers them.
    number: int  # Counts the collectives over these ranks, from 1; equal on every rank.
    what: str
    since: float  # Time of the launch on this rank, on the monotonic clock, in seconds.
    is_done: Callable[[], bool]  # Whether the collective has completed on this rank; called from any thread.

    def age_s(self) -> float:
        return time.monotonic() - self.since


class Pending:
    """The pending collectives of one engine; one thread launches them, and other threads may read them."""

    def __init__(self) -> None:
        self.launched: dict[tuple[int, ...], int] = {}  # Number of collectives, by participating ranks.
        self.open: dict[tuple[tuple[int, ...], int], Launch] = {}  # By ranks and number, in launch order.

    def add(self, ranks: tuple[int, ...], what: str, is_done: Callable[[], bool]) -> None:
        self.oldest()
        self.launched[ranks] = number = self.launched.get(ranks, 0) + 1
        self.open[ranks, number] = Launch(ranks, number, what, time.monotonic(), is_done)

    @contextmanager
    def running(self, ranks: tuple[int, ...], what: str) -> Iterator[None]:
        """Record a collective as pending while the body launches it and waits for it."""
        self.add(ranks, what, lambda: False)
        number = self.launched[ranks]
        try:
            yield
        finally:
            self.open.pop((ranks, number), None)

    def oldest(self) -> Launch | None:
        """Return the oldest pending collective, and remove completed collectives."""
        for key, launch in list(self.open.items()):
            if not launch.is_done():
                return launch
            self.open.pop(key, None)
        return None


def listed(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 1", "ranks 0, 2", "ranks 0, 1, 2 and 97 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


# ---- heartbeats: the state that each rank publishes in the store of its group ----


@dataclass(frozen=True)
class Heartbeat:
    """The state of one rank when it posted the heartbeat."""

    process: ProcessId
    beat: int  # Number of this heartbeat, from 1.
    position: str  # Description of step, window and micro-batch.
    line: str  # Innermost line of user code that the rank's thread is executing.
    waits: str  # Description of the collective that the rank waits for; empty if it is not waiting.
    launched: dict[str, int]  # Number of collectives that the rank has launched, by group.

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Heartbeat | None:
        """Deserialize the output of `to_json`; return None if `text` is not valid."""
        try:
            fields = json.loads(text)
            beat = cls(**{**fields, "process": ProcessId(**fields["process"])})
            process, launched = beat.process, dict(beat.launched)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        numbers = (process.pid, beat.beat, *launched.values())
        words = (process.host, process.space, process.started, beat.position, beat.line, beat.waits)
        is_one = all(isinstance(n, int) for n in numbers) and all(isinstance(w, str) for w in words)
        return beat if is_one else None


class Board:
    """The keys of one engine in the store of its process group."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        # All ranks create their engines in the same order, so an engine has the same number on every rank.
        number = store.add(f"pyengine/engines/{rank}", 1)
        self._origin: Any = store  # the type stubs of torch do not have `clone`
        self._prefix, self._rank = f"pyengine/stall/{number}", rank
        self._lock = threading.Lock()
        self._own: dist.Store | None = None

    @property
    def _store(self) -> dist.Store:
        # A second connection to the store, for the watching thread. The thread opens the connection on first
        # use, because a new connection to a file store reads the whole file, which would be wasteful for
        # short-lived engines.
        with self._lock:
            if self._own is None:
                own = self._origin.clone()
                own.set_timeout(_STORE_TIMEOUT)
                self._own = dist.PrefixStore(self._prefix, own)
            return self._own

    def announce(self, beat: Heartbeat) -> None:
        """Post the first heartbeat; called from the thread that uses the group's store."""
        dist.PrefixStore(self._prefix, self._origin).set(f"beat/{self._rank}", beat.to_json())

    def post(self, beat: Heartbeat) -> None:
        self._store.set(f"beat/{self._rank}", beat.to_json())

    def read(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank; a rank without a readable heartbeat is omitted."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        beats = {rank: Heartbeat.of_json(self._store.get(key)) for rank, key in keys.items()}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def verdict(self) -> str:
        """Return the published error (the verdict), which all ranks raise, or an empty string."""
        return self._store.get("verdict").decode(errors="replace") if self._store.check(["verdict"]) else ""

    def publish(self, verdict: str) -> str:
        """Publish an error for all ranks to raise; return the error that was published first."""
        return self._store.compare_set("verdict", "", verdict).decode(errors="replace")


def line_of(thread: int) -> str:
    """Return the source line that a thread is executing, and the function of this package that it calls.

    The source line is the innermost line outside PyTorch, the Python standard library and this package.
    """
    innermost = sys._current_frames().get(thread)  # noqa: SLF001 - documented, despite its name
    found, ours = find_caller(innermost)
    frame = found or innermost
    if frame is None:
        return "a thread that has ended"
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    called = [getattr(each.f_code, "co_qualname", each.f_code.co_name) for each in ours[-1:]]
    inside = f" (in pyengine's {called[0]})" if called else ""
    return f"{name}:{number} in {frame.f_code.co_name}{inside}" + (f": {text}" if text else "")


# ---- stall watch ----


class Promise:
    """A thread-safe future that completes together with another future, unless `break_` fails it first."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self._lock = threading.Lock()
        self._is_done = False

    def keep(self, done: Future[Any]) -> None:
        if self._is_first():
            try:
                value = done.value()
            except Exception as error:  # noqa: BLE001 - raised where the future is waited for
                self.future.set_exception(error)
            else:
                self.future.set_result(value)

    def break_(self, error: Exception) -> None:
        if self._is_first():
            self.future.set_exception(error)

    def _is_first(self) -> bool:
        with self._lock:
            was_done, self._is_done = self._is_done, True
        return not was_done


def failure(finding: str, error: object = None) -> str:
    """Return the error message of a failed collective; `error` is the backend's error, or None."""
    words = "" if error is None else f" ({error})"
    return f"a collective failed: {finding}. Restart all ranks from a checkpoint{words}"


class StallWatch:
    """A watch over the pending collectives of one engine.

    It warns of a stall after `after_s` seconds of waiting.

    Ranks are numbered as in the default group.

    Cost: a thread that wakes up once per second or six times per `after_s`, whichever is more frequent, runs
    for about 50 us each time, and sends about 300 bytes to the store at least every five seconds. The
    thread ends when `close` is called, when this object is freed, or when the interpreter exits.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], after_s: float) -> None:
        # ---- state of this rank ----
        self._board, self._rank, self._ranks = Board(store, rank), rank, tuple(ranks)
        self._me = ProcessId.own()
        self._thread = threading.get_ident()  # The training thread; heartbeats contain its current line.
        # Describes the position of this rank in training, for the watching thread.
        self.position: Callable[[], str] = lambda: "the creation of an engine"
        self.pending = Pending()  # Pending collectives, which the transports add.
        self.verdict = ""  # If not empty, the error that every collective of this engine raises from now on.
        # Futures (promises) that fail when an error is published. A promise lives as long as the callback
        # that may complete its future.
        self._promises: weakref.WeakValueDictionary[int, Promise] = weakref.WeakValueDictionary()
        # ---- heartbeats of this rank ----
        self._num_posted, self._posted_at = 0, time.monotonic()
        self._posted: Launch | None = None  # pending collective in the last heartbeat
        # ---- state of other ranks ----
        self._known: dict[int, ProcessId] = {}
        self._seen: dict[int, int] = {}  # Number of each rank's last heartbeat when the wait began.
        # The ranks found dead at the last check, and the collective that waits for them. The collective fails
        # if two consecutive checks find the same dead ranks.
        self._suspects: tuple[Launch | None, list[int]] = (None, [])
        # ---- warnings ----
        self._after_s = after_s
        self._tick_s = min(after_s / _LOOKS, _LONGEST_TICK_S)
        self._report_at = after_s  # age of the pending collective at which the next warning is due
        stop = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), stop, self._tick_s), name="pyengine-stall", daemon=True
        )
        self._board.announce(self._heartbeat(None))
        self._end = weakref.finalize(self, _end, stop, watcher)  # this also runs before the interpreter exits
        watcher.start()
        _log.debug("start stall watch over ranks %s, report after %g s", self._ranks, after_s)

    def close(self) -> None:
        _log.debug("end stall watch over ranks %s", self._ranks)
        self._end()
        self.pending.open.clear()

    # ---- methods for the training thread ----

    def check(self) -> None:
        if self.verdict:
            raise RuntimeError(failure(self.verdict))

    def wait(self, work: Any) -> None:
        """Wait on the host for a collective; raise the error that another rank publishes in the meantime.

        The `wait` of the work must accept a timeout, and must allow another call after a timeout.
        """
        while not work.is_completed():
            with suppress(RuntimeError):  # ignore timeouts; failures are raised below
                work.wait(timedelta(seconds=self._tick_s))
            self.check()
        work.wait()
        self.pending.oldest()

    def guard(self, future: Future[Any], call_back: Callable[[Future[Any], Any], object]) -> Future[Any]:
        """Return a future that completes with `future`, or fails if an error is published first."""
        promise = Promise()
        self._promises[id(promise)] = promise
        call_back(future, promise.keep)
        if self.verdict:
            promise.break_(RuntimeError(failure(self.verdict)))
        return promise.future

    # ---- methods after a failed collective ----

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that are known to have died, as far as this machine can tell."""
        if not self._known.keys() >= set(ranks):
            self._read_processes(ranks)
        return [r for r in ranks if r in self._known and self._known[r].state(self._me) == "dead"]

    def waiting(self, ranks: Sequence[int]) -> set[int]:
        """Return the ranks that are alive and whose last heartbeat shows that they wait for a collective."""
        return {rank for rank, beat in self._board.read(ranks).items() if beat.waits} - {*self.dead(ranks)}

    def is_decided(self, ranks: Sequence[int]) -> bool:
        """Whether any of the ranks has died, or an error has been published."""
        return bool(self.dead(ranks) or self._board.verdict())

    def conclude(self, finding: str) -> str:
        """Publish the cause of a failed collective; return the cause that was published first."""
        self.verdict = self._board.publish(finding)
        _log.debug("collectives of ranks %s fail: %s", self._ranks, self.verdict)
        return self.verdict

    def describe_dead(self, ranks: Sequence[int]) -> str:
        which = "; ".join(f"rank {rank}: {self._known[rank]}" for rank in ranks)
        return f"{listed(ranks)} of {len(self._ranks)} {'have' if len(ranks) > 1 else 'has'} died ({which})"

    # ---- methods for the watching thread ----

    def look(self) -> None:
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
            self._report(launch)  # the lowest waiting rank warns once; other ranks check again later

    def _fail_if_dead(self, launch: Launch) -> None:
        """Fail if another rank has failed, or if two consecutive checks find the same awaited ranks dead."""
        found = self._board.verdict()
        others = [rank for rank in launch.ranks if rank != self._rank]
        if self._suspects[0] != launch:
            self._read_processes(others)
            self._report_at = self._after_s
        dead = [] if found else self.dead(others)
        if dead and self._suspects == (launch, dead):
            found = self.conclude(self.describe_dead(dead))
        self._suspects = (launch, dead)  # data that a rank sent before it died may still arrive
        if found:
            self._fail(found)

    def _read_processes(self, ranks: Sequence[int]) -> None:
        for rank, beat in self._board.read(ranks).items():
            self._known[rank], self._seen[rank] = beat.process, beat.beat

    def _fail(self, verdict: str) -> None:
        self.verdict = verdict
        _log.debug("collectives of ranks %s fail: %s", self._ranks, verdict)
        for ref in self._promises.valuerefs():  # use a copy: another thread may add a promise
            if (promise := ref()) is not None:
                promise.break_(RuntimeError(failure(verdict)))

    def _post_heartbeat(self, launch: Launch | None) -> None:
        """Post a heartbeat if it is due, and immediately when this rank starts or stops waiting."""
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
        beats = self._board.read(launch.ranks)
        states = {rank: beat.process.state(self._me) for rank, beat in beats.items() if beat.waits}
        can_warn = [rank for rank, state in states.items() if state in _CAN_WARN]
        is_first = self._rank == min(can_warn, default=self._rank)
        self._report_at = math.inf if is_first else 2 * launch.age_s()
        if is_first:
            warnings.warn(self._describe(launch, beats), RuntimeWarning, stacklevel=1)

    def _describe(self, launch: Launch, beats: Mapping[int, Heartbeat]) -> str:
        """Describe the missing ranks, the position of each rank, and the pending collective."""
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
            return f"rank {rank} has not created this engine: it is running other code, or has died"
        state = beat.process.state(self._me)
        held = {
            "stopped": ", is stopped (SIGSTOP, or a debugger), and was last",
            "dead": ", has died, and was last",
        }.get(state, "")
        if state == "unknown" and beat.beat == self._seen.get(rank):
            held = ", posted no heartbeat during this wait (it has died, is stopped or disconnected), and was"
        elif state == "running" and beat.beat == self._seen.get(rank):
            held = ", is running but posts no heartbeat (native code holds the GIL), and was last"
        waits = f", waits in {beat.waits}" if beat.waits and not held else ""
        return f"rank {rank} ({beat.process}){held}{waits} at {beat.position}: {beat.line}"


def _name(ranks: tuple[int, ...]) -> str:
    """Return a short name for a group, which is equal on every rank."""
    spelled = ",".join(map(str, ranks))
    return spelled if len(ranks) <= 8 else f"{len(ranks)} of {hash(ranks) & 0xFFFFFFFF:08x}"


def _watch(ref: weakref.ref[StallWatch], stop: threading.Event, tick_s: float) -> None:
    while not stop.wait(tick_s):
        watch = ref()
        if watch is None:
            return
        try:
            watch.look()
        except dist.DistStoreError:  # the group and its store have been destroyed
            return
        del watch


def _end(stop: threading.Event, watcher: threading.Thread) -> None:
    stop.set()
    if watcher is not threading.current_thread():
        watcher.join(1.0)


# ---- roll call after a failed collective ----

# The errors of backends name a port, but users need to know the rank.


class RollCall:
    """Names the ranks that do not respond after a failed collective; this base class names no rank."""

    def __init__(self) -> None:
        self.watch: StallWatch | None = None  # the watch knows the dead ranks and the published error

    def named(self) -> AbstractContextManager[None]:
        """Name the unresponsive ranks in an error of the body. This base class does nothing."""
        return nullcontext()

    def break_off(self, error: BaseException) -> None:
        """Prevent further collectives. This base class does nothing."""


class StoreRollCall(RollCall):
    """A roll call through the store of a process group; it keeps the store alive but not the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self.store: dist.Store = _get_process_group_store(group_or_default(group))
        self._found: str | None = None
        self._broken = ""

    def named(self) -> StoreRollCall:
        """Name the unresponsive ranks in the error of a collective in the body.

        Raises:
            RuntimeError: replaces the backend's error and contains its text. Also raised if another
                collective has failed on some rank.

        Cost: nothing unless the body raises an error. The first error takes at most two seconds.
        """
        if self.watch is not None and self.watch.verdict:
            self.watch.check()
        if self._broken:
            raise RuntimeError(self._broken)
        return self

    # These methods are faster than a generator, which matters because a window has several collectives.
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            return
        if "a collective failed" in str(error):
            return
        if self._found is None:
            self._found = self._call() or (
                f"all {len(self._ranks)} ranks answer, so one of them launched the collective after the "
                "group's timeout"
            )
        # A published error has the same text on all ranks, so the error of this rank's backend is not added.
        has_verdict = self.watch is not None and self.watch.verdict
        raise RuntimeError(failure(self._found, None if has_verdict else error)) from error

    def break_off(self, error: BaseException) -> None:
        """Prevent further collectives of this rank.

        This rank failed to start a collective that other ranks have started. Further collectives would be
        matched with the wrong collectives, and gloo aborts a process that receives data of an unexpected
        size. If there is a stall watch, it makes the collectives of the other ranks fail.
        """
        if self._broken or "a collective failed" in str(error):
            self._broken = self._broken or str(error)
            return
        _log.debug("start no further collective in this group: %r", error)
        finding = f"rank {self._rank} could not start a collective that other ranks have started ({error!r})"
        self._broken = failure(finding)
        if self.watch is not None:
            with suppress(RuntimeError):  # if the store is gone, the other ranks see this process end
                self.watch.conclude(finding)

    def _call(self) -> str:
        """Return a description of the absent ranks or the published error; empty if every rank responds."""
        try:
            absent = self._absent()
            if not absent:
                return ""
            found = (
                f"{listed(absent)} of {len(self._ranks)} did not answer within {WAIT_S:g} s of the "
                "failure (dead, hanging, or running other code)"
            )
            if self.watch is None:
                return found
            dead = self.watch.dead(absent)
            return self.watch.conclude(self.watch.describe_dead(dead) if dead else found)
        except RuntimeError:
            return STORE_IS_GONE

    def _absent(self) -> list[int]:
        """Tell other ranks that this rank responds, and return the absent ranks.

        A rank is absent if it neither responds nor waits for a collective.
        """
        self.store.set(f"pyengine/answer/{self._rank}", "here")
        end = time.monotonic() + WAIT_S
        absent = self._ranks
        while absent := [rank for rank in absent if not self.store.check([f"pyengine/answer/{rank}"])]:
            if time.monotonic() > end or (self.watch is not None and self.watch.is_decided(absent)):
                break
            time.sleep(0.02)
        waiting = set() if self.watch is None else self.watch.waiting(absent)
        return [rank for rank in absent if rank not in waiting]
