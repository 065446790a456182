"""Telling, from inside a backward, when the last gradient of a set of parameters has come,
and what comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

# Torch's own Python autograd functions, of torch.compile and of module hooks, which run no backward.
_KNOWN = {"CompiledFunctionBackward", "BackwardHookFunctionBackward"}


class Watch:
    """Calls back once every parameter of a set has its gradient of the running backward.

    A hook on every parameter would cost about a microsecond each. One is enough: it sits on a parameter that
    has not arrived; when that arrives the hook moves to another missing one, and when none is missing the set
    is complete. The parameters come in the order of the backward, so the last is watched first and the hook
    hardly ever moves. A parameter that is frozen now gets no gradient, and is not waited for.

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
        while self._missing >= 0 and (
            self._has_arrived(self._missing) or not self._params[self._missing].requires_grad
        ):
            self._missing -= 1
        if self._missing < 0:
            self._on_complete()
        else:
            param = self._params[self._missing]
            self._hook = param.register_post_accumulate_grad_hook(lambda _: self._move())


@contextmanager
def watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Watch during the body, a backward."""
    try:
        for watch in watches:
            watch.start()
        yield
    finally:
        for watch in watches:
            watch.stop()


class Arrivals:
    """What one backward tells of its gradients, by a hook on every parameter: about a microsecond each.

    Args:
        params: by registration index.
    """

    def __init__(self, params: Mapping[int, Parameter]) -> None:
        self._params = params
        self._seen: list[int] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what the body, a backward, delivers."""
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
        """Indices in the order in which gradients were complete."""
        return list(dict.fromkeys(reversed(self._seen)))[::-1]

    @property
    def repeated(self) -> set[int]:
        """Indices whose gradient came more than once: autograd sums a parameter's uses within one run of its
        engine, so this takes a backward inside the backward, as reentrant activation checkpointing runs one.
        """
        return {index for index, times in Counter(self._seen).items() if times > 1}


def may_nest(loss: Tensor) -> bool:
    """Whether a backward from `loss` may run another one: only a Python autograd function (or a hook)
    can do that.
    """
    python = (node for node in _nodes([loss]) if isinstance(node, BackwardCFunction))
    return any(node.name() not in _KNOWN for node in python)  # type: ignore[attr-defined]  # torch's stubs


def graph_leaves(roots: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """Return the leaves to whose `.grad` a backward from `roots` may add."""
    return [node.variable for node in _nodes(roots) if hasattr(node, "variable")]


def _nodes(roots: Sequence[Tensor | GradientEdge]) -> Iterator[Any]:
    """Yield the nodes of the graphs behind tensors, each once."""
    seen, left = set(), [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        left += [following for following, _ in node.next_functions]
