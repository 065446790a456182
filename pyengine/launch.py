"""Run a function on several local workers, with torch.distributed.elastic underneath."""

from __future__ import annotations

import logging
import pickle
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LAUNCHERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def launch(fn: Callable[..., Any], *, workers: int, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run `fn(*args)` on every worker of a fresh gloo group on this machine, and wait for all of them.

    Args:
        fn: a function of an importable module (workers are new processes and look it up by name).
        workers: processes to start; each gets an equal share of torch's threads.
        args: picklable.

    Returns:
        What `fn` returned, by rank.

    Raises:
        ValueError: `workers` or `fn` cannot be used.
        RuntimeError: a worker failed; the others were ended, the message holds its traceback.
        KeyboardInterrupt: after Ctrl-C, when the workers have ended.

    Example:
        >>> pe.launch(train, workers=2, args=(config,))  # doctest: +SKIP
    """
    _check(fn, workers, args)
    with tempfile.TemporaryDirectory(prefix="pyengine-") as logs, _quiet(), _signals():
        try:
            results = elastic_launch(_config(workers, logs), _worker)(fn, args)
        except SignalException as stop:
            if stop.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as error:
            raise RuntimeError(_describe(error, workers)) from None
    return [results[rank] for rank in range(workers)]


def _check(fn: Callable[..., Any], workers: int, args: tuple[Any, ...]) -> None:
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers={workers!r}: need a whole number of at least 1; 2 is a good start")
    try:
        pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fn={getattr(fn, '__qualname__', fn)!r} with its args cannot be sent to another process ({error}): need "
            "a function at the top of an importable module, and picklable args"
        ) from None


def _config(workers: int, logs: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: any free one
        local_addr="127.0.0.1",
        max_restarts=0,
        # Workers write to our stdout and stderr; only their errors come through files.
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


def _worker(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # Ctrl-C reaches every process of the terminal: end at once, also inside a collective; the launcher speaks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that is soon done must not leave while another is still connecting
    torch.set_num_threads(max(1, torch.get_num_threads() // dist.get_world_size()))
    result = fn(*args)
    # Not after an exception: the others would see a closed connection, and elastic their error as the first one.
    dist.destroy_process_group()
    return result


def _describe(error: ChildFailedError, workers: int) -> str:
    rank, failure = error.get_first_failure()
    data = failure.error_file_data
    message = data.get("message", {}) if isinstance(data, dict) else {}
    trace = message.get("extraInfo", {}).get("py_callstack", "") if isinstance(message, dict) else ""
    return f"worker {rank} of {workers} failed (exit code {failure.exitcode})\n{trace or failure.message}"


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

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
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
