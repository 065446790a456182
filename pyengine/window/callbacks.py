"""Calling what others have left to be called: one that fails keeps none of the others from being called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack


def call_all(actions: Sequence[Callable[[], object]]) -> None:
    """Call every action in order, also after one that raises;
    what was raised comes out when all have been called.
    """
    with ExitStack() as stack:
        for action in reversed(actions):
            stack.callback(action)
