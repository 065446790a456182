"""Who owns the gradients of a parameter: at most one engine at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from pyengine.ops.device import current_stream

# On the node that accumulates a parameter's gradient: the mark is as long-lived as that, and no copy or file
# has it.
_MARK = "pyengine owner"


class Owner(Protocol):
    """An engine, as far as its parameters know it."""

    def notice_backward(self, param: Parameter) -> None:
        """Look at a backward that has just brought this parameter's gradient, whoever runs it."""


class Ownership:
    """One engine's mark on its parameters, until it is released or the engine is no more.

    The first parameter reports every backward to the engine: a microsecond each.

    Args:
        params: whose gradients the engine owns.
        engine: the owner.
    """

    def __init__(self, params: Iterable[Parameter], engine: Owner) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._engine = weakref.ref(engine)
        self._nodes: list[Any] = []
        self._hook: Any = None
        self._stream: torch.Stream | None = None
        self._mark()

    def follow(self) -> None:
        """Let gradients be accumulated on the current stream, if another one was current before: where
        somebody trains, or captures a graph, on a stream of their own.

        What a forward that is still alive, or DDP, holds stays where it was.
        """
        is_same = not self._params or current_stream(self._params[0].device) == self._stream
        if is_same or not all(param.requires_grad for param in self._params):
            return  # a parameter that is frozen now has no node, and could not be marked anew
        self.release()
        self._nodes = []  # a parameter has one at a time: the old ones go first
        self._mark()

    def _mark(self) -> None:
        # A parameter's gradient is accumulated on the stream that was current when this node was made. Kept
        # alive, all nodes have one stream, and autograd makes it wait for whichever streams a backward runs
        # on.
        self._nodes = [get_gradient_edge(param).node for param in self._params]
        self._stream = current_stream(self._params[0].device) if self._params else None
        for node in self._nodes:
            node.metadata[_MARK] = self._engine
        if self._nodes:
            self._hook = self._nodes[0].register_hook(partial(_report, self._engine, self._params[0]))

    def release(self) -> None:
        """Give the parameters up."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for node in self._nodes:
            node.metadata.pop(_MARK, None)


def _report(engine: weakref.ref[Owner], param: Parameter, *_: object) -> None:
    owner = engine()
    if owner is not None:
        owner.notice_backward(param)


def owner(param: Parameter) -> object | None:
    """Return the engine that owns a parameter's gradient."""
    if not param.requires_grad:
        return None
    node: Any = get_gradient_edge(param).node
    mark: weakref.ref[object] | None = node.metadata.get(_MARK)
    return None if mark is None else mark()


def owned_problems(named: Sequence[tuple[str, Parameter]]) -> list[str]:
    """Say which parameters belong to another engine that is still there."""
    taken = [name for name, param in named if owner(param) is not None]
    if taken:
        gc.collect()  # what nobody has any more is only waiting for this
        taken = [name for name, param in named if owner(param) is not None]
    if not taken:
        return []
    more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
    text = (
        f"parameter {taken[0]!r}{more} belongs to an engine that is still there: two would write the same "
        "gradients. "
    )
    return [text + "Call sync.close() on the old one first, or use that"]
