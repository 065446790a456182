"""Futures that the hook returns: what completes them, and who frees their callbacks."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """What futures of one hook's state call back; a callback that is not freed yet keeps this object alive.

    A future completes before its callback is freed, for which the backend's thread needs the interpreter: by
    then the process might be ending, and would be aborted.
    """

    def __init__(self) -> None:
        self.pending: WeakSet[Callable[[Future[Any]], Any]] = WeakSet()
        _ALL.add(self)

    def call_back(self, future: Future[Any], callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future of what `callback` returns for another one, on the thread that completes it."""

        def call(done: Future[Any], _owner: Callbacks = self) -> Any:
            return callback(done)

        self.pending.add(call)
        return future.then(call)

    def await_threads(self, within_s: float = 1.0) -> None:
        """Wait until the backend's threads have freed the callbacks that they have run."""
        end = time.monotonic() + within_s
        while self.pending and time.monotonic() < end:  # kept for good by the traceback of a failure
            time.sleep(1e-4)


@dataclass
class _UnderWay:
    """A bucket that was started, and what waits for it and returns its buffer."""

    index: int
    work: Staged
    finish: Callable[[], Tensor]
    _ends: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # DDP reads what a future holds: an exception set as its result is a result to it, one raised is not.
        self.future = self._ends.then(lambda _: self.finish())

    def start_later(self) -> None:
        """Start the next collective, if one is left; what breaks one is told by `end`."""
        try:
            if self.work.rounds_left:
                self.work.step()
        except Exception:  # noqa: BLE001 - the work raises it again
            return

    def end(self) -> None:
        """Let the future be done; whoever waits for it raises what went wrong."""
        self._ends.set_result(None)


class StagedBuckets:
    """The buckets of one backward.

    Each later collective of a bucket follows when a next bucket starts, and what is left when the last one
    has started: in the same order on every rank, and never from a thread of the backend's.
    """

    def __init__(self) -> None:
        self._under_way: list[_UnderWay] = []
        self._repeated: int | None = None  # the number of the last bucket, if one before had it, too

    def add(self, bucket: Any, work: Staged, finish: Callable[[], Tensor]) -> Future[Tensor]:
        """ReducerDriver on what is under way, behind the first collective of a bucket.

        Args:
            bucket: DDP's.
            work: started.
            finish: waits for it and returns the bucket's buffer.

        Returns:
            A future of that buffer; it is done, or has failed, when DDP has handed out its last bucket.
        """
        index = bucket.index()
        # In static_graph's first backward every bucket has the number 0, and none is the last.
        repeats = index == self._repeated or any(other.index >= index for other in self._under_way)
        self._repeated = index if repeats else None
        new = _UnderWay(index, work, finish)
        self._start_later()
        self._under_way.append(new)
        if bucket.is_last() or repeats:
            self._end_all()
        return new.future

    def _start_later(self) -> None:
        # The last bucket comes first: what it sends travels while those before it are added up.
        for each in reversed(self._under_way):
            each.start_later()

    def _end_all(self) -> None:
        for _ in range(max(each.work.rounds_left for each in self._under_way)):
            self._start_later()
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.end()
