"""Callbacks of `sync.on_step`, and the handles that remove them."""

from __future__ import annotations

from collections import OrderedDict
from functools import update_wrapper
from typing import Any

from torch.utils.hooks import RemovableHandle

from pyengine.step.step_record import StepCallback, StepRecord


class StepHandle(RemovableHandle):
    """What `sync.on_step` returns: `remove()`, or the end of `with handle:`, removes the callback.

    It may be called, and asked for attributes, as the callback itself: a decorated function can be used as
    before.
    """

    def __init__(self, callbacks: OrderedDict[int, StepCallback], callback: StepCallback) -> None:
        super().__init__(callbacks)
        self._callback = callback
        callbacks[self.id] = callback
        update_wrapper(self, callback, updated=())

    def __call__(self, record: StepRecord) -> None:
        self._callback(record)

    def __getattr__(self, name: str) -> Any:
        if name == "_callback":
            raise AttributeError(name)  # of one that copy or pickle has not filled yet
        return getattr(self._callback, name)
