"""Memory that the ranks of one host share (an arena), and reductions in this memory.

The memory is an anonymous file (`memfd_create`), which other ranks open through `/proc`. The file does not
need `/dev/shm`, and is freed when the last process that maps it ends, even after a crash.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Work
from pyengine.comm.process_state import ProcessId, own_network
from pyengine.comm.watch import listed
from pyengine.ops import native
from pyengine.ops.device import HOST

# The kinds of reductions in `csrc/shared_kind.h`, by dtype.
_SUMS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int32: 4,
}
_MAXIMA = {torch.uint8: 5}
# The interval after which a wait returns to Python, so that signal handlers can run.
_LOOK_S = 1.0
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class MemoryOffer:
    """Memory that one rank offers to the other ranks of its host."""

    process: ProcessId
    network: str  # Network namespace; ranks in different namespaces are treated as different hosts.
    refusal: str  # Why the rank cannot share memory; empty if it can.
    descriptor: int = -1  # Descriptor of the file that the rank has created; -1 if there is no file.
    token: bytes = b""  # First bytes of the file.

    @classmethod
    def make(cls, world_size: int) -> MemoryOffer:
        """Create a file that uses no memory yet; `withdraw` closes the file."""
        me = ProcessId.own()
        if sys.platform != "linux":
            return cls(me, "", f"there is no memfd_create on {sys.platform}")
        network = own_network()
        if native.core() is None:
            return cls(me, network, "pyengine's native core is missing")
        descriptor = -1
        try:
            descriptor = os.memfd_create("pyengine", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, native._core.shared_file_size(world_size))
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(descriptor, token, 0)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            return cls(me, network, f"memfd_create: {error}")
        return cls(me, network, "", descriptor, token)

    def withdraw(self) -> None:
        """Close the file in this process; ranks that have opened the file can still use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def open(self) -> int:
        """Open the file and return its descriptor, which the caller must close."""
        descriptor = os.open(f"/proc/{self.process.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0) != self.token:
            os.close(descriptor)
            raise OSError(f"the process with pid {self.process.pid} in /proc is not {self.process}")
        return descriptor


class Arena:
    """The shared memory of the ranks of a host, as seen by one rank.

    A thread runs the collectives in order, and otherwise sleeps. The thread ends when `close` is called, when
    this object is freed, or when the interpreter exits. `close` also closes the file descriptor.

    Cost: a thread and a file descriptor, and 1 MiB of memory after the first reduction of a tensor outside
    the arena.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        processes: Sequence[ProcessId],
        place: int,
        ranks: Sequence[int],
    ) -> None:
        self._core = native._core.SharedArena(descriptor, place, len(processes))
        self._processes, self._me = list(processes), processes[place]
        self._ranks, self._timeout_s = list(ranks), float("inf")  # Ranks are numbered as in messages.
        # Places of the ranks that the last check found dead. If the next check finds one of them dead again,
        # the collective fails.
        self._suspects: list[int] = []
        self._works: dict[Any, SharedWork] = {}
        self._thread = threading.Thread(
            target=_serve,
            args=(self._core, self._works, weakref.ref(self)),
            name="pyengine-shared",
            daemon=True,
        )
        self._end = weakref.finalize(self, _end, self._core, self._thread, os.getpid())
        self._thread.start()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros, of shape `[numel]`, in memory that all ranks of the host can access.

        The memory is freed together with the tensor. A forked process keeps the values from the time of the
        fork, and its writes are not visible in this process. If no shared memory is left, the tensor is in
        ordinary memory, which a reduction copies.
        """
        if numel > 0:
            try:
                block = self._core.allocate(numel * dtype.itemsize)
            except RuntimeError:
                pass
            else:
                return torch.frombuffer(block, dtype=dtype)[:numel]
        return torch.zeros(numel, dtype=dtype, device=HOST)

    @staticmethod
    def supports(flat: Tensor, *, is_max: bool) -> bool:
        kinds = _MAXIMA if is_max else _SUMS
        return flat.dtype in kinds and flat.is_contiguous()

    def reduce(self, flat: Tensor, *, is_max: bool, timeout_s: float) -> SharedWork:
        """Launch a sum or a maximum over the ranks of the host, in place.

        `supports` must return True for the tensor, and the caller must not change the tensor until it has
        waited for the work. The collective fails if any rank has not launched it within `timeout_s` seconds.

        Cost: a read and a write per element if `flat` was allocated by `allocate` on all ranks. Otherwise
            `flat` is also copied to shared memory and back, in pieces that stay in the caches.
        """
        self._timeout_s = timeout_s
        kind = (_MAXIMA if is_max else _SUMS)[flat.dtype]
        job = self._core.submit(flat.data_ptr(), flat.numel(), kind)
        work = self._works[job] = SharedWork(self._works, self._core, job, flat)
        return work

    def close(self) -> None:
        """End the thread. Pending collectives fail on this rank and on the ranks that wait for this rank."""
        self._end()

    def look(self, waited_s: float) -> None:
        """Fail the pending collective of this rank if a rank has died or the timeout has expired."""
        missing = self._core.missing()
        dead = [place for place in missing if self._processes[place].state(self._me) == "dead"]
        late = self._core.missing()  # read the list again: a rank may have finished before it died
        gone = [place for place in dead if place in late and place in self._suspects]
        self._suspects = dead
        if gone:
            which = ", ".join(f"rank {self._ranks[place]}, {self._processes[place]}" for place in gone)
            self._core.fail(f"shared memory: {which}, has died")
        elif late and waited_s > self._timeout_s:
            which = listed([self._ranks[place] for place in late])
            self._core.fail(
                f"shared memory: {which} did not launch this collective within {self._timeout_s:g} s"
            )


class SharedWork(Work):
    """A collective in progress, with the methods of `dist.Work`.

    The tensor stays alive until the collective has completed.
    """

    def __init__(self, works: dict[Any, SharedWork], core: Any, job: Any, flat: Tensor) -> None:
        self._works, self._core, self._job, self._flat = works, core, job, flat
        self._future: torch.futures.Future[Any] | None = None
        self._incomplete: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        return bool(self._core.wait(self._job, 0.0))

    def wait(self, timeout: timedelta | None = None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self._core.wait(self._job, max(0.0, min(_LOOK_S, end - time.monotonic()))):
            if time.monotonic() > end:
                raise RuntimeError("timed out waiting for the collective in shared memory")
        self.complete()
        if error := self._core.error(self._job):
            raise RuntimeError(error)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is completed by the collectives' thread or by a thread in `wait`."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = self._incomplete = future
        if not self._core.call_back(self._job):
            self.complete()
        return future

    def complete(self) -> None:
        """Complete the future, if there is one, after the collective has completed."""
        self._works.pop(self._job, None)
        with self._lock:
            future, self._incomplete = self._incomplete, None
        if future is None:
            return
        if error := self._core.error(self._job):
            future.set_exception(RuntimeError(error))
        else:
            future.set_result([self._flat])


def _serve(core: Any, works: dict[Any, SharedWork], ref: weakref.ref[Arena]) -> None:
    def on_wait(waited_s: float) -> None:
        arena = ref()
        if arena is not None:
            arena.look(waited_s)

    def on_done(job: Any) -> None:
        if (work := works.get(job)) is not None:
            work.complete()

    core.serve(on_wait, on_done)
    for work in list(works.values()):
        work.complete()


def _end(core: Any, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:  # a forked process does not have this thread
        return
    core.close()
    if thread is not threading.current_thread():
        thread.join(1.0)
