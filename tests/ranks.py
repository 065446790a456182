"""A pool of worker processes that tests share: `ranks(3).run(fn, ...)` runs `fn` on three real ranks.

Importing torch takes seconds, joining a process group takes milliseconds. A server therefore imports torch
once and forks the processes, which live for the whole session; every run creates its own process group.
A test whose whole body runs on ranks uses `@on_ranks(3)` instead. `ranks(3).ends(within_s, fn, ...)` is for
runs that are expected to fail: it returns how each rank ended, for example by a signal. Only dead processes
are replaced.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import forked

TIMEOUT_S = 90
_POLL_S = 0.05  # interval at which a run looks for stopped processes
_SAYING_S = 0.2  # time that a process gets to write its stacks
_PARTING_S = 1.0  # how long a rank that has finished waits for the others


class RankError(AssertionError):
    """A rank failed; the message contains every traceback."""


@dataclass(frozen=True)
class Ended:
    """How a run ended on one rank.

    Attributes:
        value: what the function returned.
        error: the traceback of what it raised; empty if it returned.
        exit_code: the exit code of the process, if it ended; negative for a signal.
        is_silent: whether the rank gave no answer in time and was killed.
        was_stopped: whether the rank was stopped by SIGSTOP, and continued when all others had ended.
    """

    value: Any = None
    error: str = ""
    exit_code: int | None = None
    is_silent: bool = False
    was_stopped: bool = False


class Worker:
    """A process that serves one run after another, always as the same rank.

    DTensor caches the shards of a rank by mesh for the life of the process, so the rank must not change.

    Attributes:
        rank: the rank that the process serves; None until its first run.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        context = forked.context()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends with the process
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether the process has reported that it has imported torch; does not wait."""
        return self._is_ready or self.pipe.poll()

    @property
    def is_stopped(self) -> bool:
        try:  # not os.waitid: the process is the server's child
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][:1] in ("T", "t")
        except (FileNotFoundError, ProcessLookupError):  # it has died
            return False

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, job: tuple[Any, ...]) -> None:
        if not self._is_ready:
            self._is_ready = self.pipe.recv()
        self.pipe.send(sys.path)  # first, so that the test's module can be found
        self.pipe.send(job)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def say_where(self) -> None:
        """Make the process write the stack of each of its threads, unless it is stopped."""
        os.kill(self._pid, signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> int:
        """Wait for the end of the process; return its exit code."""
        self._process.join()
        self.pipe.close()
        assert self._process.exitcode is not None
        return self._process.exitcode


class RankPool:
    """Worker processes, which are started on first use and replaced after a death or a hang."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        # The store of a failed run may live on as garbage, and ends the process if its file has been deleted.
        self._stores, self._num_runs = tempfile.TemporaryDirectory(), 0

    def run(self, group: tuple[str, int], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank of a group (backend, size); return the results by rank."""
        with self._started(group, (fn, args, kwargs), _PARTING_S) as workers:
            ends = _Ends(workers).collect(TIMEOUT_S, until_death=True)
        return _checked(ends)

    def ends(
        self, group: tuple[str, int], within_s: float, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Ended]:
        """Do the same, but accept failures; return how each rank has ended within `within_s` seconds."""
        with self._started(group, (fn, args, kwargs), parting_s=0) as workers:
            return _Ends(workers).collect(within_s, until_death=False)

    def stop(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._stores.cleanup()

    @contextmanager
    def _started(
        self, group: tuple[str, int], job: tuple[Any, ...], parting_s: float
    ) -> Iterator[list[Worker]]:
        """Send every rank of a group its job; afterwards replace the processes that died."""
        backend, world = group
        workers = self._take(world)
        store = os.path.join(self._stores.name, str(self._num_runs))
        self._num_runs += 1
        for rank, worker in enumerate(workers):
            worker.send((*job, (backend, rank, world, store), parting_s))
        try:
            yield workers
        finally:
            # New processes start while tests continue with the others.
            self._workers = [w if w.is_alive else Worker() for w in self._workers]

    def _take(self, world: int) -> list[Worker]:
        taken: list[Worker] = []
        for rank in range(world):
            free = [worker for worker in self._workers if worker.rank is None]
            worker = next((w for w in self._workers if w.rank == rank), None) or (free or [Worker()])[0]
            if worker not in self._workers:
                self._workers.append(worker)
            worker.rank = rank
            taken.append(worker)
        return taken


class _Ends:
    """Collects how the ranks of one run end."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        self._ends: dict[int, Ended] = {}
        self._stopped: set[int] = set()

    def collect(self, within_s: float, *, until_death: bool) -> list[Ended]:
        """Wait until every rank has ended, or with `until_death` one process; then kill the other ranks."""
        deadline = time.monotonic() + within_s
        while self._waiting and time.monotonic() < deadline:
            ready: list[Any] = wait(list(self._waiting), timeout=_POLL_S)
            for pipe in ready:
                self._note(pipe)
            if until_death and any(end.exit_code is not None for end in self._ends.values()):
                break
            if not ready:
                self._go_on()
        silent = list(self._waiting.values())
        for rank in silent:
            self._workers[rank].say_where()
        if silent:
            time.sleep(_SAYING_S)
        for rank in silent:
            self._workers[rank].kill()
            self._ends[rank] = Ended(is_silent=True, was_stopped=rank in self._stopped)
        return [self._ends[rank] for rank in range(len(self._workers))]

    def _note(self, pipe: Connection) -> None:
        rank = self._waiting.pop(pipe)
        was_stopped = rank in self._stopped
        try:
            value, error = pipe.recv()
            self._ends[rank] = Ended(value, error, was_stopped=was_stopped)
        except (EOFError, ConnectionResetError):
            self._ends[rank] = Ended(exit_code=self._workers[rank].close(), was_stopped=was_stopped)

    def _go_on(self) -> None:
        """Continue the stopped ranks if all other ranks have ended."""
        stopped = [rank for rank in self._waiting.values() if self._workers[rank].is_stopped]
        if len(stopped) == len(self._waiting):
            self._stopped.update(stopped)
            for rank in stopped:
                self._workers[rank].go_on()


class Ranks:
    """`world` ranks of a pool, which communicate over `backend`."""

    def __init__(self, pool: RankPool, world: int, backend: str = "gloo") -> None:
        self._pool, self.world, self._backend = pool, world, backend

    def over(self, backend: str) -> Ranks:
        return Ranks(self._pool, self.world, backend)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank of a fresh group; return the results by rank."""
        return self._pool.run((self._backend, self.world), fn, *args, **kwargs)

    def ends(self, within_s: float, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Ended]:
        """Run a function that may fail, or end or stop the process, on any rank; return how each rank ended.

        A rank that has not ended after `within_s` seconds is killed and reported as silent.
        """
        return self._pool.ends((self._backend, self.world), within_s, fn, *args, **kwargs)


def on_ranks(world: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on every rank of a fresh group; without `world`, it is an argument of the test."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(body).parameters)

        @functools.wraps(body)
        def test(ranks: Callable[[int], Ranks], **arguments: Any) -> None:
            given = {name: arguments[name] for name in own}
            ranks(world or arguments["world"]).run(_run_body, body.__module__, body.__name__, given)

        names = dict.fromkeys(["ranks", *([] if world else ["world"]), *own])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


LOOKING = threading.Lock()  # held while an engine's watch thread looks, and may write to the store


def strike(number: int) -> None:
    """Send this process a signal that ends or stops it, while none of its threads writes to the store.

    The store of these ranks is a file. If a rank is killed while it writes, torch's `FileStore` waits forever
    for the rest of the entry. A rank that is stopped while it writes holds the file's lock.
    """
    with LOOKING:
        os.kill(os.getpid(), number)


def _look_alone() -> None:
    """Make the watch thread of an engine hold the lock while it looks."""
    from pyengine.comm.watch import StallWatch

    look = StallWatch.look

    def alone(watch: StallWatch) -> None:
        with LOOKING:
            look(watch)

    StallWatch.look = alone


def _checked(ends: list[Ended]) -> list[Any]:
    failed = [f"--- rank {rank} ---\n{_told(end)}" for rank, end in enumerate(ends) if _told(end)]
    if failed:
        raise RankError("\n" + "\n".join(failed))
    return [end.value for end in ends]


def _told(end: Ended) -> str:
    """Return what went wrong on a rank; "" if nothing did."""
    if end.exit_code is not None:
        return f"its process ended, exit code {end.exit_code}"
    return "gave no answer" if end.is_silent else end.error


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    _look_alone()
    pipe.send(True)
    known = 0
    while True:
        known = _freeze(known)
        try:
            sys.path[:] = pipe.recv()
            fn, args, kwargs, place, parting_s = pipe.recv()
        except EOFError:
            return
        # A worker that fails here dies: torch's count of groups would differ from the other ranks' forever.
        store = _meet(*place)
        answer: tuple[Any, str] = None, "is ending"
        try:
            torch.manual_seed(place[1])
            torch.set_num_threads(1)  # some libraries set it
            answer = fn(*args, **kwargs), ""
        except SystemExit:
            raise  # ends the process, as in a user's program
        except BaseException:  # noqa: BLE001 - the test reports every error
            answer = None, traceback.format_exc()
        finally:
            _part(store, place[2], within_s=0 if answer[1] else parting_s)
        pipe.send(answer)
        del fn, args, kwargs, answer, store


def _freeze(known: int) -> int:
    """Freeze all objects for the garbage collector if more than `known` modules are loaded.

    Return the number of loaded modules. Most objects of a process belong to torch's modules, and collections
    at the end of each run visit every object that is not frozen. Garbage is collected first: if it were
    frozen, it would keep its groups and their threads forever.
    """
    if len(sys.modules) > known:
        gc.collect()
        gc.freeze()
    return len(sys.modules)


def _meet(backend: str, rank: int, world: int, path: str) -> Any:
    """Form the default group; return its store."""
    import torch.distributed as dist

    store = dist.FileStore(path, world)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S - 30),
    )
    dist.barrier()  # no rank leaves while another is still connecting
    return store


def _part(store: Any, world: int, within_s: float) -> None:
    """Leave the default group when all ranks have finished, or after `within_s` seconds.

    Other ranks may still be connecting a group that `dist.new_group` has already returned on this rank,
    because it does not synchronize ranks.
    """
    import torch.distributed as dist

    from pyengine.comm.launching import destroy_default_group

    store.add("parting", 1)
    end = time.monotonic() + within_s
    while time.monotonic() < end and store.add("parting", 0) < world:
        time.sleep(1e-3)
    if dist.is_initialized():
        destroy_default_group()
