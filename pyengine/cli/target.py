"""Training functions: built-in models, or the user's own function, given as MODULE:FUNCTION."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from pyengine.cli.arguments import Conflict


class Enough(BaseException):
    """Raised to end a training function after its last step; `except Exception` does not catch it."""


def add_to(parser: argparse.ArgumentParser, models: Sequence[str], default: str) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--model", choices=models, help=f"built-in model (default: {default})")
    group.add_argument(
        "--train",
        type=_spelled,
        metavar="MODULE:FUNCTION",
        help="train with this function (see below) instead of a built-in model",
    )


def _spelled(text: str) -> str:
    module, _, function = text.partition(":")
    if not module or not function:
        raise argparse.ArgumentTypeError(
            f"got {text}, expected MODULE:FUNCTION, for example mine:train for the function train in mine.py"
        )
    return text


def check(target: str) -> None:
    """Raise `Conflict` if the training function does not exist."""
    module, _, function = target.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Conflict(
            f"argument --train: got {target}, but there is no module {error.name} here: "
            f"`python -c 'import {module}'` must succeed in this folder"
        ) from None
    if not callable(found):
        raise Conflict(f"argument --train: got {target}, but {module} has no function {function}")
