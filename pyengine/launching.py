"""Run a function on every worker: torchrun's where it has started them, else on new ones of this machine."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import current_process, get_all_start_methods, resource_tracker
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # those that elastic handles
_LAUNCHERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_PROCESS = uuid.uuid4().hex  # torchrun's store outlives its workers: who of them wrote a key


def launch(fn: Callable[..., Any], *, workers: int, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run `fn(*args)` on every worker of a fresh process group, and wait for all of them.

    In a process that torchrun has started, on one host or on many, this is one of its workers: `fn` runs here, in a
    group of all of them whose backends are torch's own choice (gloo for the CPU, NCCL for CUDA). An exception of `fn`
    leaves this function as it is, and torchrun ends the other workers.

    Everywhere else workers are started on this machine, in a gloo group. They are new processes, which import what `fn`
    and `args` are made of; a script calls this under `if __name__ == "__main__":`. What was defined in a notebook, an
    interactive session or `python -c` cannot be imported: workers are then forked from this process and run torch on
    one thread each, because the threads that it has started do not live on in a fork.

    Args:
        fn: a function of an importable module or script; in a notebook any function.
        workers: processes to start, which get equal shares of torch's threads. Under torchrun its own options say how
            many there are.
        args: picklable; in a notebook anything.

    Returns:
        What `fn` returned, by rank; picklable. Under torchrun every worker gets it: print on one rank, in `fn`.

    Raises:
        ValueError: `workers` or `fn` cannot be used. Or this is torchrun's worker, and an earlier call wanted another
            number: such a script has to start its workers itself.
        RuntimeError: a worker failed; the others were ended, the message holds its traceback. Or workers have to be
            forked, and this process holds what no fork can use: an initialised device, a process group. Or this is a
            worker, torchrun's or one of `launch`, and has a process group already. Or torchrun's other workers have
            not called `launch` within half an hour.
        KeyboardInterrupt: after Ctrl-C, when the workers have ended.

    Example:
        >>> pe.launch(train, workers=2, args=(config,))  # doctest: +SKIP
    """
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers={workers!r}: need a whole number of at least 1; 2 is a good start")
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing asks itself
        raise RuntimeError(
            "launch was called while a worker imports the script that calls it, which would start workers without end: "
            'call it under `if __name__ == "__main__":`'
        )
    if dist.is_torchelastic_launched():
        return _join(fn, workers, args)
    return _start(fn, workers, args)


def _join(fn: Callable[..., Any], workers: int, args: tuple[Any, ...]) -> list[Any]:
    """Run `fn` as one of the workers that torchrun has started."""
    if dist.is_initialized():
        raise RuntimeError(
            "this worker has a process group already: call fn itself, or leave dist.init_process_group() to launch"
        )
    agents_store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("pyengine", agents_store)
    first = int(store.compare_set(f"workers/{_PROCESS}", "", str(workers)))
    if workers != first:
        raise ValueError(
            f"workers={workers} after workers={first}: all calls run on the same {world_size} workers, as torchrun has "
            "started them. A script that compares numbers of workers starts its own: run it by python, not by torchrun"
        )
    dist.init_process_group(store=_meet(store, rank, world_size), rank=rank, world_size=world_size)
    results: list[Any] = [None] * world_size
    result = record(fn)(*args)  # what torchrun says of a failure has its traceback then
    dist.all_gather_object(results, result)
    dist.destroy_process_group()
    return results


def _meet(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout
) -> dist.Store:
    """Return a store that this call of every rank shares, and no earlier one.

    The store below keeps what workers wrote that have ended since, of whatever world size. Counts of calls would go on
    from theirs, so every call has a name of its own, and rank 0's is that of the meeting: it answers whoever stands
    under a rank, until the one that lives there now has thanked.
    """
    call = uuid.uuid4().hex
    if rank == 0:
        meeting, absent = call, _gather(store, call, world_size, timeout)
    else:
        meeting, absent = _come(store, call, rank, timeout)
    if absent:
        raise RuntimeError(
            f"ranks {absent} of {world_size} have not come to this launch within {timeout.total_seconds():.0f} s: need "
            "as many calls on every worker of torchrun. A process that a worker has started takes that worker's place, "
            "here too: start it by `env -u TORCHELASTIC_RUN_ID`, which gives it workers of its own"
        )
    return dist.PrefixStore(meeting, store)


def _gather(store: dist.Store, meeting: str, world_size: int, timeout: timedelta) -> list[int]:
    """Tell every other rank the meeting, and return who has not come."""
    absent = list(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while absent and time.monotonic() < end:
        for rank in absent:
            if store.check([f"call/{rank}"]):
                store.set(f"meeting of/{store.get(f'call/{rank}').decode()}", meeting)
        time.sleep(0.01)
        absent = [rank for rank in absent if not store.check([f"{meeting}/came/{rank}"])]
    return absent


def _come(store: dist.Store, call: str, rank: int, timeout: timedelta) -> tuple[str, list[int]]:
    """Return the meeting that rank 0 has told this call, and who has not come: rank 0 or nobody."""
    store.set(f"call/{rank}", call)
    try:
        store.wait([f"meeting of/{call}"], timeout)
    except dist.DistStoreError:
        return "", [0]
    meeting = store.get(f"meeting of/{call}").decode()
    store.set(f"{meeting}/came/{rank}", "")
    return meeting, []


def _start(fn: Callable[..., Any], workers: int, args: tuple[Any, ...]) -> list[Any]:
    """Run `fn` on new workers of this machine."""
    method = _start_method(fn, args)
    if method == "fork":
        _check_fork()
    with tempfile.TemporaryDirectory(prefix="pyengine-") as logs, _quiet(), _signals():
        try:
            results = elastic_launch(_config(workers, logs, method), _worker)(fn, args, method)
        except SignalException as stop:
            if stop.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as error:
            raise RuntimeError(_describe(error, workers, Path(logs))) from None
    return [results[rank] for rank in range(workers)]


_StartMethod = Literal["spawn", "fork"]


def _start_method(fn: Callable[..., Any], args: tuple[Any, ...]) -> _StartMethod:
    """Return "fork" if workers need what stands in a `__main__` that they could not import."""
    main = sys.modules["__main__"]
    # What multiprocessing looks at too; a script that came through a pipe is called "<stdin>".
    importable = main.__spec__ is not None or Path(getattr(main, "__file__", "")).is_file()
    try:
        needs_main = b"__main__" in pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not importable:
            return "fork"
        raise ValueError(
            f"fn={getattr(fn, '__qualname__', fn)!r} with its args cannot be sent to another process ({error}): need "
            "a function at the top of an importable module, and picklable args"
        ) from None
    return "fork" if needs_main and not importable else "spawn"


def _check_fork() -> None:
    """Raise if a forked worker could not work."""
    instead = "put fn into a file of its own and import it: workers are new processes then"
    if "fork" not in get_all_start_methods():
        raise RuntimeError(
            f"fn was defined interactively, and {sys.platform} cannot fork this process: {instead}"
        )
    device = torch.accelerator.current_accelerator()
    if device is not None and getattr(torch.get_device_module(device), "is_initialized", lambda: False)():
        raise RuntimeError(
            f"{device.type} has been initialised in this process, and a fork of it cannot use the device: restart the "
            f"session and touch no device before launch (only inside fn), or {instead}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group, which a fork of it would share: call "
            f"torch.distributed.destroy_process_group() before launch, or {instead}"
        )


def _config(workers: int, logs: str, method: _StartMethod) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: any free one
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method=method,
        # Workers write to our stdout and stderr; only their errors come through files.
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], method: _StartMethod) -> Any:
    # Ctrl-C reaches every process of the terminal: end at once, also inside a collective; the launcher speaks. A fork
    # has the launcher's handlers, which would keep it from ending.
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that is soon done must not leave while another is still connecting
    # OpenMP hangs in a fork of a process that has used its threads.
    threads = 1 if method == "fork" else max(1, torch.get_num_threads() // dist.get_world_size())
    torch.set_num_threads(threads)
    result = fn(*args)
    # Not after an exception: the others would see a closed connection, and elastic their error as the first one.
    dist.destroy_process_group()
    return result


def _describe(error: ChildFailedError, workers: int, logs: Path) -> str:
    rank, failure = error.get_first_failure()
    text = failure.message  # of a signal, which leaves no file
    if Path(failure.error_file).exists():
        # The file that came first: other workers fail because of it, and elastic compares whole seconds.
        first = min(logs.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns)
        rank, text = (
            int(first.parent.name),
            json.loads(first.read_text())["message"]["extraInfo"]["py_callstack"],
        )
    elif failure.exitcode > 0:
        text = "it ended by itself, before or in fn; what it printed says why"
    return f"worker {rank} of {workers} failed (exit code {failure.exitcode})\n{text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the launcher's own log lines: what they say is in the exception that `launch` raises."""
    known = logging.root.manager.loggerDict.items()
    spoken = [
        logger
        for name, logger in known
        if isinstance(logger, logging.Logger) and name.startswith(_LAUNCHERS) and not logger.disabled
    ]
    for logger in spoken:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in spoken:
            logger.disabled = False


@contextmanager
def _signals() -> Iterator[None]:
    """Keep Ctrl-C away from workers that are still importing, and put our handlers back afterwards.

    A new process inherits the signal mask of the thread that starts it, so SIGINT is blocked in this one, and another
    thread takes its place: Python runs the handler here all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # elastic sets no handlers either
        return
    done = threading.Event()

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        done.wait()

    handlers = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in _SIGNALS)}
    resource_tracker.ensure_running()  # it would unblock SIGINT when it starts (CPython does so unasked)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    receiver = threading.Thread(target=receive, name="pyengine-interrupts", daemon=True)
    receiver.start()
    try:
        yield
    finally:
        done.set()
        receiver.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
