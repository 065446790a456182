"""Telling, from inside a backward, when the last gradient of a set of parameters has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter


class Watch:
    """Calls back once every parameter of a set has its gradient of the running backward.

    A hook on every parameter would cost about a microsecond each. One is enough: it sits on a parameter that has not
    arrived; when that arrives the hook moves to another missing one, and when none is missing the set is complete. The
    parameters come in the order of the backward, so the last is watched first and the hook hardly ever moves.

    Args:
        params: the parameters, in the order in which a backward delivers their gradients.
        has_arrived: tells whether the running backward has delivered the gradient of `params[index]`.
        on_complete: called at most once between `start` and `stop`, inside the backward.
    """

    def __init__(
        self, params: Sequence[Parameter], has_arrived: Callable[[int], bool], on_complete: Callable[[], None]
    ) -> None:
        self._params, self._has_arrived, self._on_complete = params, has_arrived, on_complete
        self._missing = 0
        self._hook: Any = None

    def start(self) -> None:
        """Begin to watch; no gradient of the coming backward may be there yet."""
        self._missing = len(self._params) - 1
        self._move()

    def stop(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _move(self) -> None:
        self.stop()
        while self._missing >= 0 and self._has_arrived(self._missing):
            self._missing -= 1
        if self._missing < 0:
            self._on_complete()
        else:
            param = self._params[self._missing]
            self._hook = param.register_post_accumulate_grad_hook(lambda _: self._move())
