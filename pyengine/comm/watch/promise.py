"""A future of our own for a collective, which may end as that does or before it."""

from __future__ import annotations

import threading
from typing import Any

from torch.futures import Future


class Promise:
    """A future that another one keeps, unless somebody breaks it first; from any thread."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self._lock = threading.Lock()
        self._is_settled = False

    def keep(self, done: Future[Any]) -> None:
        """Have what `done` has."""
        if self._is_first():
            try:
                value = done.value()
            except Exception as error:  # noqa: BLE001 - whoever waits for this one raises it
                self.future.set_exception(error)
            else:
                self.future.set_result(value)

    def break_(self, error: Exception) -> None:
        """Fail."""
        if self._is_first():
            self.future.set_exception(error)

    def _is_first(self) -> bool:
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
        return not was_settled
