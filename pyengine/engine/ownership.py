"""Who owns the gradients of a parameter: at most one engine at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

# On the node that accumulates a parameter's gradient: the mark is as long-lived as that, and no copy or file
# has it.
_MARK = "pyengine owner"


class Ownership:
    """One engine's mark on its parameters, until it is released or the engine is no more.

    Args:
        params: whose gradients the engine owns.
        engine: the owner.
    """

    def __init__(self, params: Iterable[Parameter], engine: object) -> None:
        self._nodes: list[Any] = [get_gradient_edge(param).node for param in params if param.requires_grad]
        for node in self._nodes:
            node.metadata[_MARK] = weakref.ref(engine)

    def release(self) -> None:
        """Give the parameters up."""
        for node in self._nodes:
            node.metadata.pop(_MARK, None)


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
