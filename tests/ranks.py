"""A pool of worker processes that tests borrow: `ranks(3).run(fn, ...)` runs `fn` on three real ranks.

Starting a process with torch takes seconds, joining a process group milliseconds; so the processes live for the whole
session and every run gets a process group of its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

MAX_RANKS = 4
TIMEOUT_S = 90


class RankError(AssertionError):
    """Some rank raised; the message holds every traceback."""


class RankPool:
    """Worker processes, started on first use and again after a hang."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []

    def run(self, group: tuple[str, int], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on the ranks of a group of (backend, size); return the results by rank."""
        backend, world = group
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            pipes = [pipe for _, pipe in self._workers[:world]]
            for rank, pipe in enumerate(pipes):
                pipe.send(sys.path)
                pipe.send((fn, args, kwargs, backend, rank, world, store))
            return _checked(self._collect(pipes, world))

    def stop(self) -> None:
        """Kill every worker."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def _start(self, world: int) -> None:
        context = mp.get_context("spawn")
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def _collect(self, pipes: list[Any], world: int) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                missing = sorted(waiting.values())
                self.stop()
                raise RankError(
                    f"ranks {missing} of {world} gave no answer in {TIMEOUT_S} s; others: {answers}"
                )
            for pipe in ready:
                try:
                    answers[waiting.pop(pipe)] = pipe.recv()
                except EOFError:
                    self.stop()
                    raise RankError(f"a rank died; answers so far: {answers}") from None
        return [answers[rank] for rank in range(world)]


class Ranks:
    """`world` ranks of a pool, which talk over `backend`."""

    def __init__(self, pool: RankPool, world: int, backend: str = "gloo") -> None:
        self._pool, self.world, self._backend = pool, world, backend

    def over(self, backend: str) -> Ranks:
        """Return the same ranks over another backend than gloo."""
        return Ranks(self._pool, self.world, backend)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank of a fresh group; return the results by rank."""
        return self._pool.run((self._backend, self.world), fn, *args, **kwargs)


def _checked(answers: list[tuple[bool, Any]]) -> list[Any]:
    failed = [f"--- rank {rank} ---\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
    if failed:
        raise RankError("\n" + "\n".join(failed))
    return [value for _, value in answers]


def _serve(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = pipe.recv()  # first, so that the test's module can be found
            fn, args, kwargs, backend, rank, world, store = pipe.recv()
        except EOFError:
            return
        # A worker that fails here dies: what torch counts of groups would differ from the others' for good.
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S - 30),
        )
        dist.barrier()  # nobody leaves while another is still connecting
        try:
            torch.manual_seed(rank)
            answer = True, fn(*args, **kwargs)
        except BaseException:  # noqa: BLE001 - whatever it was, the test wants to see it
            answer = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
