"""Detect when the gradients of a backward have arrived.

Hooks inside the backward detect when a set of gradients is complete, and which gradients arrive repeatedly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

# The hooks registered with `register_post_accumulate_grad_hook`, by id; None if there are none. torch has no
# public attribute for these hooks.
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")

# Autograd functions that torch itself defines in Python, for torch.compile and for module hooks. These
# functions do not run a nested backward.
_KNOWN = {"CompiledFunctionBackward", "BackwardHookFunctionBackward"}


class Watch:
    """Calls a function when all gradients of a set have arrived.

    A hook on every parameter would cost about a microsecond per parameter. Therefore a single hook watches
    one parameter whose gradient has not arrived. When that gradient arrives, the hook moves to another
    parameter without a gradient. If there is no such parameter, the set is complete. The parameters are in
    backward order and the last parameter is watched first, so the hook rarely moves. Frozen parameters are
    ignored, because they get no gradient.

    Args:
        params: the parameters, in the order in which a backward produces their gradients.
        has_arrived: returns whether the running backward has accumulated the gradient of the given slot.
        on_complete: called at most once between `start` and `stop`, inside the backward.
        first: the slot of `params[0]`.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        has_arrived: Callable[[int], bool],
        on_complete: Callable[[], None],
        first: int = 0,
    ) -> None:
        self._params, self._has_arrived, self._on_complete = params, has_arrived, on_complete
        self._first, self._missing = first, 0
        self._hook: Any = None

    def start(self) -> None:
        """Start watching, before the backward has accumulated any gradient."""
        self._missing = len(self._params) - 1
        self._move()

    def stop(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _move(self) -> None:
        if self._hook is not None:
            self.stop()
        while self._missing >= 0 and (
            self._has_arrived(self._first + self._missing) or not self._params[self._missing].requires_grad
        ):
            self._missing -= 1
        if self._missing < 0:
            self._on_complete()
        else:
            param = self._params[self._missing]
            self._hook = param.register_post_accumulate_grad_hook(lambda _: self._move())


@contextmanager
def watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Run the watches during the body, which runs a backward."""
    try:
        for watch in watches:
            watch.start()
        yield
    finally:
        for watch in watches:
            watch.stop()


class Arrivals:
    """Records which gradients a backward accumulates, with a hook on every parameter.

    A hook costs about a microsecond, so only one backward is recorded.
    """

    def __init__(self, params: Mapping[int, Parameter]) -> None:
        self._params = params
        self._seen: list[int] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        hooks = [
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._seen.append(index))
            for index, param in self._params.items()
            if param.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def order(self) -> list[int]:
        """Parameter indices in the order in which their gradients became complete."""
        return list(dict.fromkeys(reversed(self._seen)))[::-1]

    @property
    def repeated(self) -> set[int]:
        """Indices of parameters whose gradient was accumulated more than once in this backward.

        Autograd sums the gradients from all uses of a parameter, and accumulates the sum once. A second
        accumulation occurs only if a nested backward runs, for example in reentrant activation checkpointing.
        """
        return {index for index, times in Counter(self._seen).items() if times > 1}


def may_nest(loss: Tensor) -> bool:
    """Whether a backward from `loss` may run a nested backward.

    Only a Python autograd function or a hook can run a nested backward.
    """
    python = (node for node in _nodes([loss]) if isinstance(node, BackwardCFunction))
    return any(node.name() not in _KNOWN for node in python)  # type: ignore[attr-defined]  # torch's stubs


def graph_leaves(roots: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """Return the leaf tensors whose gradient a backward from `roots` may accumulate."""
    return [node.variable for node in _nodes(roots) if hasattr(node, "variable")]


def _nodes(roots: Sequence[Tensor | GradientEdge]) -> Iterator[Any]:
    """Yield each node of the autograd graphs of `roots` once."""
    seen, left = set(), [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        left += [following for following, _ in node.next_functions]
