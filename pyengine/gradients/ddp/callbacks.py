"""Callbacks of a backend's futures, which its threads run and free: before the process ends, that has to be
over.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.futures import Future

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
