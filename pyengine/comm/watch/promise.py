"""A future of our own for a collective, which completes with it or fails before it."""

from __future__ import annotations

import threading
from typing import Any

from torch.futures import Future


class Promise:
    """A future that completes with another one, unless it is broken first; from any thread."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self._lock = threading.Lock()
        self._is_done = False

    def keep(self, done: Future[Any]) -> None:
        """Complete with the result or error of `done`."""
        if self._is_first():
            try:
                value = done.value()
            except Exception as error:  # noqa: BLE001 - raised where the future is waited for
                self.future.set_exception(error)
            else:
                self.future.set_result(value)

    def break_(self, error: Exception) -> None:
        """Fail with an error."""
        if self._is_first():
            self.future.set_exception(error)

    def _is_first(self) -> bool:
        with self._lock:
            was_done, self._is_done = self._is_done, True
        return not was_done
