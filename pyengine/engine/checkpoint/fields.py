"""What kind of value every field of a state has, whatever engine it belongs to."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def unlike_saved(content: dict[str, Any]) -> list[str]:
    """Say which fields are not of the kind that an engine saves."""
    return [
        f"{name}={reprlib.repr(content[name])}, need {need}"
        for name, (is_one, need) in _KINDS.items()
        if not is_one(content[name])
    ]


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number, of at least `least`."""
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    """Whether a value is a number, inf and nan included."""
    return type(value) in (int, float)


def _is_loss(value: Any) -> bool:
    return value is None or is_number(value)


def _is_list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return type(value) is list and all(map(is_one, value))


def _are_distinct(value: Any) -> bool:
    return _is_list_of(value, is_whole) and len(set(value)) == len(value)


def _is_dict_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and is_one(item) for name, item in value.items()
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _is_dense(value: Any) -> bool:
    return _is_tensor(value) and value.layout is torch.strided


def _are_tensors(value: Any) -> bool:
    return _is_dict_of(value, _is_dense)


def _is_param(value: Any) -> bool:
    if not (type(value) in (tuple, list) and len(value) == 4):
        return False
    name, shape, strides, dtype = value
    return (
        isinstance(name, str)
        and isinstance(dtype, str)
        and _is_list_of(shape, is_whole)
        and _is_list_of(strides, is_whole)
    )


def _is_identity(value: Any) -> bool:
    return (
        _is_dict_of(value, lambda _: True)
        and set(value) - {"run"} == {"accumulator", "terms", "batch_norms", "params"}
        and is_whole(value.get("run", 1), 1)
        and isinstance(value["accumulator"], str)
        and (value["terms"] is None or is_whole(value["terms"], 1))
        and is_whole(value["batch_norms"])
        and _is_list_of(value["params"], _is_param)
    )


_Kind = tuple[Callable[[Any], bool], str]
_WHOLE: _Kind = (is_whole, "a whole number")
_POSITIVE: _Kind = (lambda value: is_whole(value, 1), "a whole number of at least 1")
_DISTINCT: _Kind = (_are_distinct, "a list of whole numbers, all different")
_NUMBERS: _Kind = (lambda value: _is_list_of(value, is_number), "a list of numbers")
_KINDS: dict[str, _Kind] = {
    "window": _WHOLE,
    "steps": _WHOLE,
    "rank": _WHOLE,
    "world_size": _POSITIVE,
    "identity": (_is_identity, "what describes the engine"),
    "accumulate": _POSITIVE,
    "is_between_loops": (lambda value: type(value) is bool, "True or False"),
    "order": _DISTINCT,
    "places": _DISTINCT,
    "counts": _NUMBERS,
    "dropped": (lambda value: _is_list_of(value, lambda item: type(item) is bool), "a list of bools"),
    "losses": (lambda value: _is_list_of(value, _is_loss), "a list of numbers, or None"),
    "totals": (lambda value: _is_dict_of(value, is_number), "numbers by loss"),
    "sums": (lambda value: _is_dict_of(value, _are_tensors), "tensors by part by parameter"),
    "batch_norm": (lambda value: _is_list_of(value, _is_dense), "a list of tensors"),
    "carry": (lambda value: _is_dict_of(value, _is_tensor), "tensors by parameter"),
    "scaler": (lambda value: _is_dict_of(value, is_number), "numbers by name"),
    "residuals": (lambda value: _is_dict_of(value, _is_dense), "tensors by parameter"),
    "rng": (lambda value: _is_dict_of(value, lambda _: True), "states by generator"),
}
