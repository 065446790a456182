"""Run a function on every worker: torchrun's where it has started them, else on new ones of this machine."""

from __future__ import annotations

import faulthandler
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import current_process, get_all_start_methods
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import record

from pyengine.comm import local_workers
from pyengine.comm.default_group import destroy_default_group

_PROCESS = uuid.uuid4().hex  # torchrun's store outlives its workers: who of them wrote a key


def launch(
    fn: Callable[..., Any],
    *,
    workers: int | None = None,
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `fn(*args)` on every worker of a fresh process group, and wait for all of them.

    In a process that torchrun has started, on one host or on many, this is one of its workers: `fn` runs
    here, in a group of all of them whose backends are torch's own choice (gloo for the CPU, NCCL for CUDA).
    An exception of `fn` leaves this function as it is, and torchrun ends the other workers.

    Everywhere else workers are started on this machine, in a gloo group over its loopback interface, which no
    other machine reaches. They are new processes, which import what `fn` and `args` are made of; a script
    calls this under `if __name__ == "__main__":`. What was defined in a notebook, an interactive session or
    `python -c` cannot be imported: workers are then forked from this process and run torch on one thread
    each, because the threads that it has started do not live on in a fork.

    Args:
        fn: a function of an importable module or script; in a notebook any function.
        workers: processes to start, which get equal shares of torch's threads. Under torchrun its own options
            say how many there are.
        args: picklable; in a notebook anything.
        timeout_s: seconds after which workers that have not ended are ended, and the error says where each of
            them stood. None: no limit. Under torchrun every worker counts for itself: it prints where it
            stood and exits, whereupon torchrun ends the others.
        num_processes: the same as `workers`, as Accelerate's notebook_launcher calls it; one of the two.

    Returns:
        What `fn` returned, by rank; picklable. Under torchrun every worker gets it: print on one rank, in
        `fn`.

    Raises:
        TypeError: neither `workers` nor `num_processes`, or both.
        ValueError: `workers` or `fn` cannot be used, or this machine has too few cores for so many. Or this
            is torchrun's worker, and an earlier call wanted another number: such a script has to start its
            workers itself.
        RuntimeError: a worker failed; the others were ended, the message holds its traceback. Or this machine
            lets no such number be started, or has no loopback interface. Or workers have to be forked, and
            this process holds what no fork can use: an initialised device, a process group. Or this is a
            worker, torchrun's or one of `launch`, and has a process group already. Or torchrun's other
            workers have not called `launch` within half an hour.
        TimeoutError: workers have not ended within `timeout_s`; now they have.
        KeyboardInterrupt: after Ctrl-C, when the workers have ended.
        SystemExit: the same after SIGTERM, with 128 + the signal.

    Example:
        >>> pe.launch(train, workers=2, args=(config,))  # doctest: +SKIP
    """
    workers = _number(workers, num_processes)
    _check_timeout(timeout_s)
    _check_guarded()
    if dist.is_torchelastic_launched():
        return _join(fn, workers, args, timeout_s)
    return _start(fn, workers, args, timeout_s)


def _number(workers: int | None, num_processes: int | None) -> int:
    """Return how many workers are wanted, by either name."""
    if (workers is None) == (num_processes is None):
        given = "neither" if workers is None else "both"
        raise TypeError(
            f"workers, num_processes: got {given}, and they mean the same; pass one of them, workers=2 say"
        )
    name, number = ("workers", workers) if num_processes is None else ("num_processes", num_processes)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={number!r}: need a whole number of at least 1; 2 is a good start")
    return number


def _check_guarded() -> None:
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing asks itself
        raise RuntimeError(
            "launch was called while a worker imports the script that calls it, which would start workers "
            "without end: "
            'call it under `if __name__ == "__main__":`'
        )


def _check_timeout(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s <= threading.TIMEOUT_MAX):
        raise ValueError(
            f"timeout_s={timeout_s!r}: need seconds above 0 after which workers are ended; None for no limit"
        )


def _join(fn: Callable[..., Any], workers: int, args: tuple[Any, ...], timeout_s: float | None) -> list[Any]:
    """Run `fn` as one of the workers that torchrun has started."""
    if dist.is_initialized():
        raise RuntimeError(
            "this worker has a process group already: call fn itself, or leave dist.init_process_group() "
            "to launch"
        )
    try:
        agents_store, rank, world_size = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise RuntimeError(
            f"this process has inherited the place of a worker that shares no store with it ({error}): "
            "start what a worker of launch starts by `env -u TORCHELASTIC_RUN_ID`, which gives it workers "
            "of its own"
        ) from None
    store = dist.PrefixStore("pyengine", agents_store)
    first = int(store.compare_set(f"workers/{_PROCESS}", "", str(workers)))
    if workers != first:
        raise ValueError(
            f"workers={workers} after workers={first}: all calls run on the same {world_size} workers, as "
            "torchrun has started them. A script that compares numbers of workers starts its own: run it "
            "by python, not by torchrun"
        )
    dist.init_process_group(store=_meet(store, rank, world_size), rank=rank, world_size=world_size)
    results: list[Any] = [None] * world_size
    if timeout_s is not None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    try:
        result = record(fn)(*args)  # what torchrun says of a failure has its traceback then
        dist.all_gather_object(results, result)
    finally:
        if timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()
    destroy_default_group()
    return results


def _meet(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout
) -> dist.Store:
    """Return a store that this call of every rank shares, and no earlier one.

    The store below keeps what workers wrote that have ended since, of whatever world size. A counter of calls
    would go on from theirs, so every call has a random name, and rank 0's names the store: it is written for
    every call found under a rank, until the one that waits there now has confirmed it.
    """
    call = uuid.uuid4().hex
    if rank == 0:
        meeting, absent = call, _gather(store, call, world_size, timeout)
    else:
        meeting, absent = _come(store, call, rank, timeout)
    if absent:
        raise RuntimeError(
            f"ranks {absent} of {world_size} have not come to this launch within "
            f"{timeout.total_seconds():.0f} s: need as many calls on every worker of torchrun. A process "
            "that a worker has started takes that worker's place, here too: start it by `env -u "
            "TORCHELASTIC_RUN_ID`, which gives it workers of its own"
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


def _start(fn: Callable[..., Any], workers: int, args: tuple[Any, ...], timeout_s: float | None) -> list[Any]:
    """Run `fn` on new workers of this machine."""
    local_workers.check_number(workers)
    method = _start_method(fn, args)
    if method == "fork":
        _check_fork()
    return local_workers.run(fn, args, workers=workers, method=method, timeout_s=timeout_s)


def _start_method(fn: Callable[..., Any], args: tuple[Any, ...]) -> local_workers.StartMethod:
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
            f"fn={getattr(fn, '__qualname__', fn)!r} with its args cannot be sent to another process "
            f"({error}): need a function at the top of an importable module, and picklable args"
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
            f"{device.type} has been initialised in this process, and a fork of it cannot use the device: "
            f"restart the session and touch no device before launch (only inside fn), or {instead}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group, which a fork of it would share: call "
            f"torch.distributed.destroy_process_group() before launch, or {instead}"
        )
