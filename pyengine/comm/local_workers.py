"""New worker processes of this machine, in a gloo group that no other machine can reach."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from pyengine.comm.default_group import destroy_default_group

if sys.platform != "win32":
    import fcntl
    import resource

StartMethod = Literal["spawn", "fork"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_LOOK_S = 0.1  # between two looks at the workers
_GRACE_S = 30.0  # for workers that have been told to end
_MOST_A_CORE = 32
# Open files of a process besides three for every worker, to which the default group and an engine's are
# connected: its own, and those that fn opens.
_FILES = 64
# For workers that are asked where they stand.
_ANSWER_S = 2.0


@dataclass(frozen=True)
class _Job:
    """What a worker is told."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    threads: int
    interface: str
    run_id: str
    folder: Path
    timeout_s: float | None = None

    def result(self, rank: int) -> Path:
        """Return the file for what `fn` returned."""
        return self.folder / f"result-{rank}"

    def error(self, rank: int) -> Path:
        """Return the file for the traceback of what it raised."""
        return self.folder / f"error-{rank}"

    def trace(self, rank: int) -> Path:
        """Return the file for where it stands when it is asked."""
        return self.folder / f"trace-{rank}"


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    workers: int,
    method: StartMethod,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `fn(*args)` on new processes, and return the results by rank; when this returns or raises, all have
    ended.

    Workers meet in a file of a folder that only this user can enter, and connect over the loopback interface.

    Raises:
        RuntimeError: one failed. The others were ended.
        TimeoutError: some had not ended after `timeout_s` seconds.
        KeyboardInterrupt, SystemExit: this process was told to end.
    """
    # OpenMP hangs in a fork of a process that has used its threads.
    threads = 1 if method == "fork" else max(1, torch.get_num_threads() // workers)
    with tempfile.TemporaryDirectory(prefix="pyengine-") as folder, signals_noted(method) as received:
        job = _Job(fn, args, workers, threads, loopback(), uuid.uuid4().hex, Path(folder), timeout_s)
        processes: list[BaseProcess] = []
        late = ""
        try:
            _start(job, method, processes, received)
            failed = _wait(processes, job, received)
            late = "" if failed or received else _where_late(processes, job)
        finally:
            _end(processes, received)
        if received:
            return []  # of no use to anyone
        if failed:
            raise RuntimeError(_describe(failed, processes, job))
        if late:
            raise TimeoutError(late)
        return [pickle.loads(job.result(rank).read_bytes()) for rank in range(workers)]


def loopback() -> str:
    """Return the name of the network interface that only this machine can reach.

    Raises:
        RuntimeError: there is none, or it is down.
    """
    request, flag_up, flag_loopback = (
        0x8913 if sys.platform == "linux" else 0xC0206911,
        0x1,
        0x8,
    )  # SIOCGIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            answer = fcntl.ioctl(any_socket, request, struct.pack("16s16x", name.encode()))
            flags = struct.unpack_from("16xH", answer)[0]
            if flags & flag_loopback and flags & flag_up:
                return name
    raise RuntimeError(
        "no loopback interface is up, and workers of one machine connect over it: `ip link set lo up`, or "
        "start the container or sandbox with a network of its own"
    )


def check_number(workers: int) -> None:
    """Raise if this machine is not one for so many workers, before any is started.

    Raises:
        ValueError: there are not enough cores for them.
        RuntimeError: this process may not open enough files.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > cores * _MOST_A_CORE:
        raise ValueError(
            f"workers={workers}: need at most {cores * _MOST_A_CORE} on the {cores} cores of this machine, "
            f"{_MOST_A_CORE} a core: each is a process that holds torch and its threads; for more, torchrun "
            "joins several machines"
        )
    limit, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + 3 * workers
    if limit != resource.RLIM_INFINITY and limit < need:
        raise RuntimeError(
            f"workers={workers} need {need} open files in each process, and this one may open {limit}: "
            f"`ulimit -n {need}` or more before the start"
        )


def _start(job: _Job, method: StartMethod, processes: list[BaseProcess], received: Sequence[int]) -> None:
    """Start the processes, one after the other, so that all are known that have been started."""
    for rank in range(job.workers):
        if received:
            return
        try:
            started = start_processes(_work, (rank, job), nprocs=1, join=False, start_method=method)
        except OSError as error:
            raise RuntimeError(
                f"workers={job.workers}: worker {rank} could not be started ({error}): this machine or "
                "container lets no more processes, files or memory be used; need fewer workers, or a "
                "higher limit (`ulimit -a` names them)"
            ) from error
        processes += started.processes


def _wait(processes: Sequence[BaseProcess], job: _Job, received: Sequence[int]) -> list[int]:
    """Wait until all have ended, one has failed, a signal came or the time is over;
    return the ranks that failed by themselves.
    """
    until = math.inf if job.timeout_s is None else time.monotonic() + job.timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running and not received and time.monotonic() < until:
        if not (ended := wait(running, _LOOK_S)):
            continue
        ranks = [rank for sentinel, rank in running.items() if sentinel in ended]
        running = {sentinel: rank for sentinel, rank in running.items() if rank not in ranks}
        for rank in ranks:
            processes[rank].join()
        # One that was killed takes others along: it has ended before them.
        failed = [
            rank
            for rank, process in enumerate(processes)
            if process.exitcode or (process.exitcode == 0 and not job.result(rank).exists())
        ]
        if failed:
            return sorted(failed, key=lambda rank: rank not in ranks)
    return []


def _where_late(processes: Sequence[BaseProcess], job: _Job) -> str:
    """Say where the workers stand that have not ended; nothing if all have."""
    late = {rank: process for rank, process in enumerate(processes) if process.is_alive()}
    if not late:
        return ""
    asked = [rank for rank in late if job.trace(rank).exists()]  # those have a handler
    for rank in asked:
        _send(late[rank], signal.SIGUSR1)
    end = time.monotonic() + _ANSWER_S
    while not all(job.trace(rank).stat().st_size for rank in asked) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    said = [f"worker {rank}: {_stands(job.trace(rank)) if rank in asked else _STARTS}" for rank in late]
    head = (
        f"timeout_s={job.timeout_s:g} is over, and {len(late)} of {job.workers} workers had not ended; they "
        "have been ended. Where they stood:"
    )
    return "\n".join([head, *said])


_STARTS = "it was still starting: importing torch, or what fn and args are made of"


def _stands(trace: Path) -> str:
    """Return the lines of a worker's stack that are not the launcher's, innermost first."""
    lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    own = next((index for index, line in enumerate(lines) if __file__ in line), len(lines))
    return "\n".join(lines[:own]) if lines else "it did not answer: it was stopped (SIGSTOP, or a debugger)"


def _end(processes: Sequence[BaseProcess], received: Sequence[int]) -> None:
    """End those that still run: by the signal that came, and by force when another one comes or they take too
    long.
    """
    running = [process for process in processes if process.is_alive()]
    told, until = len(received), time.monotonic() + _GRACE_S
    for process in running:
        # One that is stopped gets no other signal before it goes on.
        _send(process, received[0] if received else signal.SIGTERM, signal.SIGCONT)
    while running and len(received) == told and time.monotonic() < until:
        wait([process.sentinel for process in running], _LOOK_S)
        running = [process for process in running if process.is_alive()]
    for process in running:
        process.kill()
    for process in processes:
        process.join(_GRACE_S)  # one in an uninterruptible sleep of the kernel stays


def _send(process: BaseProcess, *numbers: int) -> None:
    for number in numbers:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def _work(_: int, rank: int, job: _Job) -> None:
    """Be a worker."""
    # Ctrl-C reaches every process of the terminal: end at once, also inside a collective; the launcher
    # speaks. A fork has the launcher's handlers, which would keep it from ending.
    for number in _handled():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _handled())
    faulthandler.enable(file=2)  # the descriptor: a notebook's sys.stderr has none
    try:
        if job.timeout_s is not None:
            trace = job.trace(rank).open("w")
            faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
        _set_environment(rank, job)
        result = _run_in_group(rank, job)
        job.result(rank).write_bytes(pickle.dumps(result))
    except Exception:  # noqa: BLE001 - whatever it is, the launcher tells it
        job.error(rank).write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        sys.exit(1)


def _run_in_group(rank: int, job: _Job) -> Any:
    store = dist.FileStore(str(job.folder / "store"), job.workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.workers)
    dist.barrier()  # a rank that is soon done must not leave while another is still connecting
    torch.set_num_threads(job.threads)
    try:
        result = job.fn(*job.args)
    except SystemExit as stop:
        if stop.code:
            raise
        result = None
    # Not after an exception: the others would see a closed connection, and fail first.
    destroy_default_group()
    return result


def _set_environment(rank: int, job: _Job) -> None:
    """Set what torchrun sets, but for the port of a store: there is none."""
    own, all_of_them = str(rank), str(job.workers)
    os.environ |= {
        "RANK": own,
        "LOCAL_RANK": own,
        "ROLE_RANK": own,
        "GROUP_RANK": "0",
        "WORLD_SIZE": all_of_them,
        "LOCAL_WORLD_SIZE": all_of_them,
        "ROLE_WORLD_SIZE": all_of_them,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)  # another launcher's, which is not to be met
    # Also for the groups that fn makes itself. Who has named an interface is believed.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={job.interface}")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


def _describe(failed: Sequence[int], processes: Sequence[BaseProcess], job: _Job) -> str:
    """Say which worker failed first, and of what.

    What kills a worker comes before the errors of others, which lose their connections to it; but a lost
    connection may abort a process too.
    """
    codes = [process.exitcode or 0 for process in processes]
    killed = [rank for rank in failed if codes[rank] < 0 and codes[rank] != -signal.SIGABRT]
    errors = sorted(job.folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors and not killed:
        rank, text = int(errors[0].name.rpartition("-")[2]), errors[0].read_text(encoding="utf-8")
        code = codes[failed[0]]
    else:
        rank = (killed or failed)[0]
        code = codes[rank]
        text = _of_signal(processes[rank]) if code < 0 else _BY_ITSELF
    return f"worker {rank} of {job.workers} failed (exit code {code})\n{text}"


_BY_ITSELF = "it ended by itself, before or in fn; what it printed says why"


def _of_signal(process: BaseProcess) -> str:
    number = -(process.exitcode or 0)
    name = next((each.name for each in signal.Signals if each == number), "of no name")
    said = f"Signal {number} ({name}) received by PID {process.pid}"
    return f"{said}; the kernel sends it when memory runs out" if name == "SIGKILL" else said


def _handled() -> list[signal.Signals]:
    """Return the signals that end a launch: under nohup a hang-up does not, nor Ctrl-C a shell's background
    job.
    """
    numbers = [getattr(signal, name) for name in _SIGNALS]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def signals_noted(method: StartMethod) -> Iterator[list[int]]:
    """Give a list that signals are noted in, keep Ctrl-C away from workers that are still importing, and put
    all back; then the first of them counts, whenever it came.

    A new process inherits the signal mask of the thread that starts it, so SIGINT is blocked in this one, and
    another thread takes its place: Python runs the handler here all the same. A fork inherits handlers too,
    and would only note what is to end it, so everything waits until it has none of them any more.

    Raises:
        KeyboardInterrupt, SystemExit: behind the body, if one was noted.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers
        return
    done = threading.Event()
    blocked = {signal.SIGINT} if method == "spawn" else set(_handled())

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        done.wait()

    handlers = {number: signal.getsignal(number) for number in _handled()}
    resource_tracker.ensure_running()  # it would unblock SIGINT when it starts (CPython does so unasked)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    receiver = threading.Thread(target=receive, name="pyengine-interrupts", daemon=True)
    receiver.start()
    try:
        for number in handlers:
            signal.signal(number, lambda came, frame: received.append(signal.Signals(came)))
        yield received
    finally:
        done.set()
        receiver.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if received:
            raise KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])
