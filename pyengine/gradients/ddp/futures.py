"""The futures of the DDP hook, and their callbacks."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.futures import Future

from pyengine.comm.staged import Staged

_ALL: WeakSet[Callbacks] = WeakSet()


@atexit.register
def _await_all_threads() -> None:
    for callbacks in list(_ALL):
        callbacks.await_threads()


class Callbacks:
    """The callbacks on the futures that one DDP hook has returned.

    A callback that has not been freed keeps this object alive. A future completes before its callback is
    freed, and the backend's thread needs the Python interpreter to free the callback. If the process is
    already exiting at that time, it aborts.
    """

    def __init__(self) -> None:
        self.pending: WeakSet[Callable[[Future[Any]], Any]] = WeakSet()
        _ALL.add(self)

    def call_back(self, future: Future[Any], callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future of `callback(future)`, which runs on the thread that completes `future`."""

        def call(done: Future[Any], _owner: Callbacks = self) -> Any:
            return callback(done)

        self.pending.add(call)
        return future.then(call)

    def await_threads(self, within_s: float = 1.0) -> None:
        """Wait until the backend's threads have freed all callbacks that have run."""
        end = time.monotonic() + within_s
        while self.pending and time.monotonic() < end:  # the traceback of an error may keep a callback alive
            time.sleep(1e-4)


class StagedBuckets:
    """The buckets of one backward, each of which is reduced by several collectives.

    A bucket's first collective is launched when the bucket is ready. Later collectives are launched together
    with the next buckets, and the remaining collectives after the last bucket. The order is the same on every
    rank, and no backend thread launches a collective.
    """

    def __init__(self) -> None:
        # For each launched bucket: its number, its reduction, and a future that completes when all buckets
        # have been launched.
        self._under_way: list[tuple[int, Staged, Future[Any]]] = []
        self._repeated: int | None = None  # the previous bucket's number, if it repeats an earlier number

    def add(self, bucket: Any, work: Staged, finish: Callable[[], Tensor]) -> Future[Tensor]:
        """Add a launched bucket; launch the next collective of earlier buckets.

        `finish` waits for `work` and returns the buffer of the bucket. The returned future
        completes or fails when DDP passes its last bucket to the hook.
        """
        index = bucket.index()
        # In the first backward with static_graph every bucket has number 0, and no bucket is marked as the
        # last.
        repeats = index == self._repeated or any(other >= index for other, *_ in self._under_way)
        self._repeated = index if repeats else None
        ends: Future[Any] = Future()
        # Raise errors inside a callback: if the future's value were an exception, DDP would use it as a
        # result.
        future = ends.then(lambda _: finish())
        self._start_later()
        self._under_way.append((index, work, ends))
        if bucket.is_last() or repeats:
            for _ in range(max(work.rounds_left for _, work, _ in self._under_way)):
                self._start_later()
            under_way, self._under_way = self._under_way, []
            for *_, ends in under_way:
                ends.set_result(None)  # waiting for the bucket's future raises the error of a collective
        return future

    def _start_later(self) -> None:
        """Launch the next collective of every bucket."""
        # Start with the last bucket, so that its collective runs while the CPU sums the earlier buckets.
        for _, work, _ in reversed(self._under_way):
            with suppress(Exception):  # `finish` raises the error again when it waits for the work
                if work.rounds_left:
                    work.step()
