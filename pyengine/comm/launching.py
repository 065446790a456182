"""Run a function on every worker: either on torchrun's workers or on new processes on this machine.

torch.distributed.elastic does not start the new workers, because its agent serves a store on every network
interface and unpickles the data that it reads from this store.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_all_start_methods, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

# `torch.distributed.nn.functional` has to be imported before a group exists. When the module is first
# imported (for example by an optimizer), the current default group becomes the default value of function
# arguments, which would keep the threads of the group alive.
import torch.distributed.nn.functional
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import record
from torch.multiprocessing import (  # type: ignore[attr-defined]  # torch's stubs
    _prctl_pr_set_pdeathsig,
    start_processes,
)

_log = logging.getLogger("pyengine.comm")
T = TypeVar("T")

_PROCESS = uuid.uuid4().hex  # in every key of this process, because torchrun's store outlives its workers
_MAX_WORKERS_PER_CORE = 32
_POLL_S = 0.1
_TRACE_S = 1.0  # Time that workers have to write their stacks after the deadline.
_GRACE_S = 30.0  # Time that workers have to exit after SIGTERM; they may save a checkpoint first.
_WITHIN_S = 0.2  # Time to wait for a group's threads, which free their callbacks within milliseconds.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Gloo and NCCL use this network interface, which no other machine can reach.
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def launch(
    fn: Callable[..., T],
    *,
    workers: int,
    args: tuple[Any, ...] = (),
    timeout_s: float | None = None,
) -> list[T]:
    """Run `fn(*args)` on every worker of a fresh process group, and wait for all of them.

    Under torchrun, this process is one of the workers. `fn` runs in this process, in a group of all workers
    with torch's default backends (gloo for the CPU, NCCL for CUDA). An exception in `fn` is raised unchanged,
    and torchrun terminates the other workers.

    Without torchrun, the workers are new processes on this machine, in a gloo group over the loopback
    interface. New workers import the modules of `fn` and `args`, so a script has to call `launch` under `if
    __name__ == "__main__":`. Functions from a notebook, an interactive session or `python -c` cannot be
    imported. In this case the workers are forked from this process, and each runs torch on one thread.

    Args:
        fn: a function in an importable module or script; in a notebook, any function.
        workers: number of processes to start; each gets an equal share of torch's threads. Under torchrun,
            torchrun's options determine the number of workers.
        args: picklable arguments of `fn`; in a notebook, any arguments.
        timeout_s: seconds after which running workers are terminated; the error contains the stack of each of
            these workers. If None, there is no limit. Under torchrun, a worker that reaches the limit prints
            its stack and exits, and torchrun then terminates the other workers.

    Returns:
        The results of `fn`, by rank; they must be picklable. Under torchrun every worker gets all results,
        so a script should print on only one rank, inside `fn`.

    Raises:
        ValueError: `workers`, `timeout_s` or `fn` is invalid; this machine has too few cores; or an earlier
            call under torchrun requested a different number of workers (a script that needs different numbers
            of workers must run without torchrun).
        RuntimeError: a worker failed (the other workers were terminated, and the message contains the failed
            worker's rank and traceback); this machine cannot start so many processes; workers have to be
            forked, but this process has an initialized device or a process group, which a fork cannot use;
            this process is a worker that already has a process group; or the other workers have not called
            `launch` within half an hour.
        TimeoutError: workers were still running after `timeout_s`, and were terminated.
        KeyboardInterrupt: after Ctrl-C, when the workers have exited.
        SystemExit: after SIGTERM, when the workers have exited. The exit code is 128 + the signal number. Not
            raised if the caller has installed a handler for SIGTERM.

    Example:
        >>> pe.launch(train, workers=2, args=(config,))  # doctest: +SKIP
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers={workers!r}: expected a whole number of at least 1; 2 is a good start")
    if timeout_s is not None and not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout_s={timeout_s!r}: expected a positive number of seconds, after which workers are "
            "terminated, or None for no limit"
        )
    if dist.is_torchelastic_launched():
        return _run_on_torchruns_workers(fn, args, workers, timeout_s)
    check_number(workers)
    method = _start_method(fn, args)
    # OpenMP hangs in a forked process if the parent has used OpenMP threads.
    threads = 1 if method == "fork" else max(1, torch.get_num_threads() // workers)
    deadline = math.inf if timeout_s is None else time.time() + timeout_s
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="pyengine-") as folder, _sigterm_raises():
        job = _Job(fn, args, workers, threads, Path(folder), timeout_s, deadline)
        try:
            _start(job, method, processes)
            _wait(job, processes)
        finally:
            _end(job, processes)
        return [pickle.loads(job.file("result", rank).read_bytes()) for rank in range(workers)]  # noqa: S301 - SECURITY.md


# --- On torchrun's workers ---


def _run_on_torchruns_workers(
    fn: Callable[..., T], args: tuple[Any, ...], workers: int, timeout_s: float | None
) -> list[T]:
    if dist.is_initialized():
        raise RuntimeError(
            "this worker already has a process group: call fn directly, or let launch call "
            "dist.init_process_group()"
        )
    try:
        agents_store, rank, world_size = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise RuntimeError(
            f"this process has inherited the environment of a worker, but shares no store with it ({error}): "
            "a worker must start processes that call launch with `env -u TORCHELASTIC_RUN_ID`, so that they "
            "have their own workers"
        ) from None
    store = dist.PrefixStore("pyengine", agents_store)
    first = int(store.compare_set(f"workers/{_PROCESS}", "", str(workers)))
    if workers != first:
        raise ValueError(
            f"workers={workers} after workers={first}: all calls run on the same {world_size} workers, which "
            "torchrun has started. A script that compares numbers of workers starts its own workers: run it "
            "with python, not with torchrun"
        )
    dist.init_process_group(store=_meet(store, rank, world_size), rank=rank, world_size=world_size)
    results: list[Any] = [None] * world_size
    if timeout_s is not None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    try:
        result = record(fn)(*args)  # writes the traceback of an exception to torchrun's summary
        dist.all_gather_object(results, result)
    finally:
        if timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()
    destroy_default_group()
    return results


def _meet(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout
) -> dist.Store:
    """Return a store that all ranks share for this call, and that no earlier call has used.

    torchrun's store keeps the keys of workers that have exited, whatever their world size was, so a counter
    of calls would continue the count of those workers. Therefore each call has a random name, and the name of
    rank 0's call is the prefix of the shared store. Every other rank registers its call in the store. Rank 0
    sends the name of its own call to each registered call, until every other rank's current call has
    confirmed the name.
    """
    call, absent = uuid.uuid4().hex, list(range(1, world_size))
    if rank == 0:
        meeting, end = call, time.monotonic() + timeout.total_seconds()
        while absent and time.monotonic() < end:
            for other in absent:
                if store.check([f"call/{other}"]):
                    store.set(f"meeting of/{store.get(f'call/{other}').decode()}", meeting)
            time.sleep(0.01)
            absent = [other for other in absent if not store.check([f"{meeting}/came/{other}"])]
    else:
        store.set(f"call/{rank}", call)
        try:
            store.wait([f"meeting of/{call}"], timeout)
        except dist.DistStoreError:
            absent = [0]
        else:
            meeting, absent = store.get(f"meeting of/{call}").decode(), []
            store.set(f"{meeting}/came/{rank}", "")
    if absent:
        raise RuntimeError(
            f"ranks {absent} of {world_size} have not joined this launch within "
            f"{timeout.total_seconds():.0f} s: every worker of torchrun must call launch the same number of "
            "times. A process that a worker has started is mistaken for that worker here: start the process "
            "with `env -u TORCHELASTIC_RUN_ID`, so that it has its own workers"
        )
    return dist.PrefixStore(meeting, store)


# --- On new workers of this machine ---


def num_cores() -> int:
    """Return the number of logical cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_number(workers: int) -> None:
    """Raise ValueError if this machine has too few cores for `workers`."""
    cores = num_cores()
    if workers > cores * _MAX_WORKERS_PER_CORE:
        raise ValueError(
            f"workers={workers}: expected at most {cores * _MAX_WORKERS_PER_CORE} on the {cores} cores of "
            f"this machine ({_MAX_WORKERS_PER_CORE} per core), because each worker is a process that holds "
            "torch and its threads; for more workers, use torchrun on several machines"
        )


def _start_method(fn: Callable[..., Any], args: tuple[Any, ...]) -> Literal["spawn", "fork"]:
    """Return "fork" if `fn` or `args` need a `__main__` that a new process cannot import, or else "spawn"."""
    main = sys.modules["__main__"]
    # multiprocessing uses the same condition; a script read from a pipe has the file name "<stdin>".
    importable = main.__spec__ is not None or Path(getattr(main, "__file__", "")).is_file()
    try:
        needs_main = b"__main__" in pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if importable:
            raise ValueError(
                f"fn={getattr(fn, '__qualname__', fn)!r} and its args cannot be sent to another process "
                f"({error}): expected a function at the top level of an importable module, and picklable args"
            ) from None
        needs_main = True
    if importable or not needs_main:
        return "spawn"
    instead = "put fn into a file of its own and import it, so that workers are new processes"
    if "fork" not in get_all_start_methods():
        raise RuntimeError(
            f"fn was defined interactively, and {sys.platform} cannot fork this process: {instead}"
        )
    device = torch.accelerator.current_accelerator()
    if device is not None and getattr(torch.get_device_module(device), "is_initialized", lambda: False)():
        raise RuntimeError(
            f"{device.type} has been initialised in this process, and a fork of it cannot use the device: "
            f"restart the session and touch no device before launch (only inside fn), or {instead}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group, which a fork of it would share: call "
            f"torch.distributed.destroy_process_group() before launch, or {instead}"
        )
    return "fork"


@dataclass(frozen=True)
class _Job:
    """The description of a job, which every worker receives.

    A worker writes files to a folder that only this user can access: its result, the traceback of an
    exception, and at the deadline its stack. The file of the stack ("trace") exists as soon as the worker has
    imported `fn`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    threads: int
    folder: Path
    timeout_s: float | None = None
    deadline: float = math.inf  # time at which `timeout_s` expires, on the clock of `time.time()`

    def file(self, kind: Literal["result", "error", "trace"], rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the body, so that workers are ended; an existing handler is kept."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set a handler
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM while processes are started; the new processes inherit the signal mask.

    If the signals were not blocked, Ctrl-C would make every worker print the traceback of its interrupted
    import, and could leave behind a process that has been started but not recorded yet.
    """
    resource_tracker.ensure_running()  # starting the tracker later would unblock the signals (in CPython)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start(job: _Job, method: str, processes: list[BaseProcess]) -> None:
    """Start the workers in turn; `processes` lists the started workers even if a later start fails."""
    with signals_blocked():
        for rank in range(job.workers):
            try:
                context = start_processes(_work, (rank, job), nprocs=1, join=False, start_method=method)
            except OSError as error:
                raise RuntimeError(
                    f"workers={job.workers}: worker {rank} could not be started ({error}): this machine or "
                    "container allows no more processes, files or memory; use fewer workers, or raise "
                    "the limit (`ulimit -a` lists the limits)"
                ) from error
            processes += context.processes


def _wait(job: _Job, processes: Sequence[BaseProcess]) -> None:
    while True:
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        failed = {
            rank: code
            for rank, code in codes.items()
            if code or (code == 0 and not job.file("result", rank).exists())
        }
        if failed:
            raise RuntimeError(_describe_failure(job, processes, failed))
        running = {rank: processes[rank] for rank, code in codes.items() if code is None}
        if not running:
            return
        if time.time() > job.deadline + _TRACE_S:
            stacks = [f"worker {rank}: {_stack(job.file('trace', rank))}" for rank in running]
            head = (
                f"timeout_s={job.timeout_s:g} has expired, and {len(running)} of {job.workers} workers were "
                "still running; they have been terminated. Their stacks:"
            )
            raise TimeoutError("\n".join([head, *stacks]))
        wait([process.sentinel for process in running.values()], _POLL_S)


def _describe_failure(job: _Job, processes: Sequence[BaseProcess], failed: dict[int, int]) -> str:
    """Describe which worker failed first, and why it failed.

    A killed worker takes precedence over exceptions in other workers, because the other workers lose their
    connections to the killed worker. SIGABRT does not count as a kill, because a lost connection may abort a
    process. If no worker was killed, the first exception is the cause, regardless of which worker exited
    first.
    """
    killed = [rank for rank, code in failed.items() if code < 0 and code != -signal.SIGABRT]
    errors = sorted(job.folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors and not killed:
        rank, code = int(errors[0].name.rpartition("-")[2]), 1
        text = errors[0].read_text(encoding="utf-8")
    else:
        rank = (killed or list(failed))[0]
        code = failed[rank]
        text = "it exited by itself, before or inside fn; its output shows why"
        if code < 0:
            name = next((each.name for each in signal.Signals if each == -code), "unnamed")
            text = f"Signal {-code} ({name}) received by PID {processes[rank].pid}"
            text += "; the kernel sends it when memory runs out" if name == "SIGKILL" else ""
    return f"worker {rank} of {job.workers} failed (exit code {code})\n{text}"


def _stack(trace: Path) -> str:
    """Return the stack of the thread that runs `fn`, innermost call first, without the calls in this file."""
    if not trace.exists():
        return "it was still starting: importing torch, or the modules of fn and args"
    for thread in trace.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        lines = thread.splitlines()
        own = next((index for index, line in enumerate(lines) if __file__ in line), 0)
        if own:
            return "\n".join(lines[:own])
    return "it wrote no stack: it was stopped (SIGSTOP, or a debugger)"


def _end(job: _Job, processes: Sequence[BaseProcess]) -> None:
    """Terminate workers with SIGTERM, so that they can save their state, and kill workers that remain."""
    try:
        for rank, process in enumerate(processes):
            # A worker without a trace file is still importing, with signals blocked, and has nothing to save.
            (process.terminate if job.file("trace", rank).exists() else process.kill)()
        end = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:  # kills the workers even if a second Ctrl-C interrupts the wait
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_GRACE_S)  # a process in uninterruptible sleep may not exit


# --- In a worker ---


def _work(_: int, rank: int, job: _Job) -> None:
    """Run `fn` in the group of all workers, and write its result or the traceback of its exception."""
    for number in _SIGNALS:
        # Ctrl-C reaches every process of the terminal. With the default handler, a worker then exits
        # immediately, even inside a collective, and without a traceback. A forked process would otherwise
        # keep the handlers of its parent. A background job of a shell ignores Ctrl-C, and so do its workers.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Kill this worker when the launcher exits. A background job ignores the SIGINT that torch requests for
    # this purpose.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    faulthandler.enable(file=2)  # sys.stderr has no file descriptor in a notebook, so pass the number
    with job.file("trace", rank).open("w") as trace:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if job.timeout_s is not None:
            faulthandler.dump_traceback_later(max(0.01, job.deadline - time.time()), file=trace)
        try:
            _set_environment(rank, job)
            result = pickle.dumps(_run_in_group(rank, job))
            job.file("result", rank).write_bytes(result)
        except Exception:  # noqa: BLE001 - `launch` reports any exception
            text = traceback.format_exc()
            job.file("error", rank).write_text(text, encoding="utf-8", errors="backslashreplace")
            sys.exit(1)
        finally:
            if job.timeout_s is not None:
                faulthandler.cancel_dump_traceback_later()


def _set_environment(rank: int, job: _Job) -> None:
    """Set the environment variables that torchrun would set, except the port, because no port is used."""
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(job.workers)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": job.folder.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)  # may be set by another launcher, whose store must not be used
    # Groups that `fn` creates also use the loopback interface, unless the user has chosen an interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_LOOPBACK}")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


def _run_in_group(rank: int, job: _Job) -> Any:
    # Use a file store, because a `TCPStore` would listen on every network interface.
    store = dist.FileStore(str(job.folder / "store"), job.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.workers)
    dist.barrier()  # a rank that finishes early must not exit while other ranks are connecting
    torch.set_num_threads(job.threads)
    try:
        result = job.fn(*job.args)
    except SystemExit as stop:
        if stop.code:
            raise
        result = None
    # Do not destroy the group after an exception: other workers would see a closed connection and fail first.
    destroy_default_group()
    return result


# ---- end of a process group ----


def destroy_default_group() -> None:
    """Destroy torch's default group, and join its threads unless other code still holds the group.

    The threads of a gloo group may hold the last reference to a tensor of a collective, and need the GIL to
    free it. While the interpreter is shutting down, taking the GIL aborts or hangs the process. Therefore
    these threads are joined earlier, when the group is destroyed and this thread does not hold the GIL.

    Cost: a garbage collection, which frees reference cycles that hold the group (for example models under
    DDP). A cycle must not hold the last reference to the group, because freeing the cycle would join the
    threads without releasing the GIL. A thread of the group must not hold the last reference either, because
    the thread would join itself and end the process. For example, the callback of torch's PowerSGD hook holds
    the group until a thread of the group has freed the callback. If other code keeps the group, the call
    takes another fifth of a second.
    """
    group, alone = dist.group.WORLD, object()
    dist.destroy_process_group()
    gc.collect()
    end = time.monotonic() + _WITHIN_S
    while sys.getrefcount(group) > sys.getrefcount(alone) and time.monotonic() < end:
        time.sleep(1e-4)  # sleeping releases the GIL
    del group
    _log.debug("destroyed the default process group")
