"""Training functions of the user's own, named on the command line as MODULE:FUNCTION."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pyengine.cli.arguments import Conflict


class Enough(BaseException):
    """Ends a training function after its last step; no Exception,
    so that it passes through the user's handlers.
    """


def check_spelling(target: str) -> None:
    """Raise Conflict if it is not MODULE:FUNCTION; imports nothing."""
    module, _, function = target.partition(":")
    if not module or not function:
        raise Conflict(f"argument --train: got {target}, need MODULE:FUNCTION, mine:train say (of mine.py)")


def check(target: str) -> None:
    """Raise Conflict if the function is not there."""
    module, _, function = target.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Conflict(
            f"argument --train: got {target}, and there is no module {error.name} here: need one that "
            f"`python -c 'import {module}'` finds in this folder"
        ) from None
    if not callable(found):
        raise Conflict(f"argument --train: got {target}, and {module} has no function {function}")


def load(target: str) -> Callable[[Any], None]:
    """Return the function."""
    module, _, function = target.partition(":")
    found: Callable[[Any], None] = getattr(import_module(module), function)
    return found
