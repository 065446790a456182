"""Error messages for arguments with a wrong name, without a name, or of a wrong type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Argument names of other libraries, and the corresponding names in pyengine.
_ELSEWHERE = {
    "gradient_accumulation_steps": "accumulate",
    "accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "grad_accum_steps": "accumulate",
    "group": "process_group",
    "mesh": "device_mesh",
    "bucket_cap": "bucket_cap_mb",
    "comm_dtype": "wire",
    "reduce_dtype": "wire",
}


def explained(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that wrong arguments raise a TypeError that names the right arguments."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_answer(signature, args, kwargs) or str(error)) from None
        return function(*args, **kwargs)

    return call


def _answer(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the error message for arguments that do not fit the signature; "" if an argument is missing."""
    kinds = signature.parameters.values()
    positional = [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = [each.name for each in kinds if each.kind is each.KEYWORD_ONLY]
    if len(args) > len(positional):
        value = args[len(positional)]
        meant = "accumulate" if isinstance(value, int) and "accumulate" in named else named[0]
        return f"got {value!r} without a name after {positional[-1]}: pass it by name, {meant}={value!r}"
    for name in kwargs.keys() - {*positional, *named}:
        close = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, named, 1)
        if close and close[0] in named:
            return f"{name}={kwargs[name]!r}: here this argument is called {close[0]}="
        return f"{name}={kwargs[name]!r}: there is no such argument; the arguments are {', '.join(named)}"
    return ""


# Constructor arguments of an engine that cannot change later.
_FIXED = {
    *("wire", "accumulator", "nonfinite", "bucket_cap_mb", "stall_after_s", "process_group", "device_mesh"),
    *("axes", "shared_memory", "defer", "defer_budget_mb"),
}


def answer_to_setting(kind: type, name: str, value: object) -> str:
    """Return the error message for the assignment `engine.name = value`; empty if it is allowed."""
    if name == "accumulate" or _ELSEWHERE.get(name) == "accumulate" != name:
        if name != "gradient_accumulation_steps":
            return (
                f"set sync.gradient_accumulation_steps = {value!r}, between windows: {name} is not a setting"
            )
        return ""
    if name in _FIXED or _ELSEWHERE.get(name) in _FIXED:
        fixed = name if name in _FIXED else _ELSEWHERE[name]
        return f"pass {fixed}={value!r} when you create the engine: its {fixed} cannot change later"
    member = None if name.startswith("_") else getattr(kind, name, None)
    if callable(member):
        return f"call sync.{name}(...): {name} is a method, not a setting"
    if isinstance(member, property) and member.fset is None:
        return f"read sync.{name}: it cannot be set"
    return ""


def check_function(name: str, value: object, of: str) -> None:
    """Raise TypeError if an argument is not callable; `of` describes the required function."""
    if not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a function {of}")
