"""`main_grad`: the sum, for layers that add to it directly.

The backward of Megatron's and TransformerEngine's fused GEMMs does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_is_written = attrgetter("grad_added_to_main_grad")
_ATTRIBUTES = ("main_grad", "grad_added_to_main_grad", "__getstate__")


def set_main_grad(params: Sequence[Parameter], views: Sequence[Tensor]) -> None:
    """Set `main_grad` of every parameter to its view of the sum; pickles of the model do not contain it."""
    for param, view in zip(params, views, strict=True):
        param.main_grad = view  # type: ignore[attr-defined]
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        param.__getstate__ = partial(_state, vars(param))  # type: ignore[method-assign]


def remove_main_grad(params: Sequence[Parameter]) -> None:
    """Remove the attributes that `set_main_grad` has set."""
    for param in params:
        for name in _ATTRIBUTES:
            vars(param).pop(name, None)


def written(params: Sequence[Parameter]) -> list[int]:
    """Return the indices of parameters whose layer has added to `main_grad`."""
    try:
        if not any(map(_is_written, params)):  # called twenty times a window: half the time of the loop below
            return []
    except AttributeError:  # a parameter without main_grad
        pass
    return [i for i, param in enumerate(params) if getattr(param, "grad_added_to_main_grad", False)]


def pop_written(params: Sequence[Parameter]) -> list[int]:
    """Return the same as `written`, and clear the flags."""
    indices = written(params)
    for index in indices:
        params[index].grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return indices


def _state(attributes: dict[str, Any]) -> dict[str, Any] | None:
    """Return a parameter's attributes for pickle, without `main_grad`."""
    return {name: value for name, value in attributes.items() if name not in _ATTRIBUTES} or None
