"""Real XLA replicas on the CPU: `replicas(2).run(fn, ...)` runs `fn(rank, ...)` on two of them.

In torch_xla, the replicas of one host are threads of one process, so a process has only one world size. The
session keeps one process for each world size and environment, and restarts it after a crash.

XLA's CPU backend matches replicas in a collective by the number of the compiled module, and replicas that
compile the same program at the same time get different numbers. Programs with a collective are therefore
launched in the order of ranks: the first replica compiles, and the others find its module in the cache. This
requires two settings: a pool thread for each blocked execution, and no donation of inputs, because freeing a
donated input waits for the peers.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 240
MEETING_S = 60


class ReplicaError(AssertionError):
    """A replica raised, or the process of the replicas died."""


class Replicas:
    """The replicas of one process.

    Args:
        world: the number of replicas.
        environment: environment variables of the process; they override those that the world size requires.
    """

    def __init__(self, world: int, environment: dict[str, str]) -> None:
        self.world, self._environment = world, environment
        self._process: Any = None
        self._dumps = tempfile.TemporaryDirectory()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every replica; return the results by rank."""
        self._start()
        self._pipe.send(sys.path)
        self._pipe.send((fn, args, kwargs))
        try:
            answered = self._pipe.poll(TIMEOUT_S)
            is_good, answer = self._pipe.recv() if answered else (False, f"no answer in {TIMEOUT_S} s")
        except EOFError:
            is_good, answer = False, "the process died: a replica waited for one that did not come?"
        if not is_good:
            self.stop()
            raise ReplicaError(answer)
        return answer

    def programs(self) -> set[Path]:
        """Return the files of all programs that have been compiled so far, after their optimization."""
        return set(Path(self._dumps.name).glob("*after_optimizations.txt"))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.world), daemon=True)
        before = dict(os.environ)
        os.environ.update(
            {
                "PJRT_DEVICE": "CPU",
                "CPU_NUM_DEVICES": str(self.world),
                "XLA_THREAD_POOL_SIZE": str(max(2 * self.world, 4)),
                "XLA_ENABLE_PARAM_ALIASING": str(int(self.world == 1)),
                "XLA_FLAGS": f"--xla_dump_to={self._dumps.name} --xla_dump_hlo_as_text",
            }
            | self._environment
        )
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()


class _Lockstep:
    """Launches programs with collectives in the order of ranks, and all other programs immediately."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.barrier = threading.Barrier(world)
        self.here = threading.local()

    def install(self) -> None:
        """Patch torch_xla's native module so that this object launches all programs."""
        import torch_xla

        native = torch_xla._XLAC
        for name in ("_xla_all_reduce", "_xla_all_reduce_inplace", "_xla_all_gather"):
            setattr(native, name, self._noting(getattr(native, name)))
        self._launch = native._xla_step_marker
        native._xla_step_marker = self._step_marker

    def _noting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.here.has_collective = True
            return collective(*args)

        return noted

    def _step_marker(
        self, device: str = "", devices: Any = (), wait: bool = True, reset_scope: bool = True
    ) -> None:
        del wait
        if not self.here.has_collective:
            self._launch(device, list(devices), wait=False, reset_scope=reset_scope)
            return
        for rank in range(self._world):
            self.barrier.wait(MEETING_S)
            if rank == self.here.rank:
                self._launch(device, list(devices), wait=False, reset_scope=reset_scope)
        self.barrier.wait(MEETING_S)
        self.here.has_collective = False


def _serve(pipe: Any, world: int) -> None:
    sys.path[:] = pipe.recv()
    import torch
    import torch_xla
    from torch_xla._internal import pjrt

    torch.set_num_threads(1)
    lockstep = _Lockstep(world)
    if world > 1:
        lockstep.install()
    torch_xla.device()  # the runtime must be running before the first backward of this process
    while True:
        try:
            pipe.send(_on_every_replica(pjrt, lockstep, world, pipe.recv()))
            sys.path[:] = pipe.recv()
        except EOFError:
            return


def _on_every_replica(pjrt: Any, lockstep: _Lockstep, world: int, job: Any) -> tuple[bool, Any]:
    import torch_xla.runtime as xr

    fn, args, kwargs = job

    answers: dict[int, Any] = {}
    errors: list[str] = []

    def body() -> None:
        rank = xr.global_ordinal()
        lockstep.here.rank, lockstep.here.has_collective = rank, False
        try:
            answers[rank] = fn(rank, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the test reports every error
            broken = isinstance(error, threading.BrokenBarrierError)
            errors.append("" if broken else f"--- replica {rank} ---\n{traceback.format_exc()}")
            lockstep.barrier.abort()

    if world == 1:
        body()
    else:
        pjrt._run_thread_per_device(0, 1, body, pjrt.initialize_multiprocess)
    if errors:
        return False, "\n".join(filter(None, errors)) or "replicas waited for one that did not come"
    return True, [answers[rank] for rank in range(world)]
