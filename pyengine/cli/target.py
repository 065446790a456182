"""Training functions: built-in models, or a function of the user's, given as MODULE:FUNCTION."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from pyengine.cli.arguments import Conflict


class Enough(BaseException):
    """Ends a training function after its last step; no Exception, so that the user's handlers ignore it."""


def add_to(parser: argparse.ArgumentParser, models: Sequence[str], default: str) -> None:
    parser.add_argument("--model", choices=models, help=f"built-in model (default: {default})")
    parser.add_argument(
        "--train",
        metavar="MODULE:FUNCTION",
        help="train with this function (see below) instead of a built-in model",
    )


def check_spelling(options: argparse.Namespace) -> None:
    """Raise `Conflict` if `--train` is given together with `--model` or is misspelled; import nothing."""
    if options.model is not None:
        raise Conflict(
            f"argument --model: got {options.model} with --train {options.train}: leave one of them out"
        )
    module, _, function = options.train.partition(":")
    if not module or not function:
        raise Conflict(
            f"argument --train: got {options.train}, need MODULE:FUNCTION, for example mine:train for "
            "the function train of mine.py"
        )


def check(target: str) -> None:
    """Raise `Conflict` if the function does not exist."""
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
    module, _, function = target.partition(":")
    found: Callable[[Any], None] = getattr(import_module(module), function)
    return found
