"""What the arguments of several commands share: types, checks, the error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pyengine.comm.launching import check_number


class Conflict(ValueError):
    """Two arguments that cannot go together."""


def check_writable(argument: str, file: Path) -> None:
    """Raise `Conflict` if a file could not be written at the end; leave none behind."""
    existed = file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise Conflict(
            f"argument {argument}: cannot write {file} ({error.strerror}): name a file, in a folder that is "
            "there and yours"
        ) from None
    if not existed:
        file.unlink(missing_ok=True)  # torchrun's workers all look


def check_workers(numbers: Collection[int]) -> None:
    """Raise `Conflict` if this machine has too few cores for so many workers."""
    try:
        check_number(max(numbers))
    except ValueError as error:
        raise Conflict(f"argument --workers: {error}") from None


def each(defaults: Mapping[str, float]) -> str:
    """Describe a default that differs between models."""
    return "default: " + ", ".join(f"{model} {value:g}" for model, value in defaults.items())


def whole(least: int) -> Callable[[str], int]:
    """Return a type for `add_argument`: whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text}, need a whole number of at least {least}")
        return value

    return parse


def number(text: str) -> float:
    """Return a number; nan where it is none, which is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def above_zero(text: str) -> float:
    """Parse a number above 0, inf among them: a type for `add_argument`."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"got {text}, need a number above 0")
    return value


def finite_above_zero(text: str) -> float:
    """Parse a finite number above 0: a type for `add_argument`."""
    value = above_zero(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"got {text}, need a finite number above 0")
    return value


def different_wholes(example: str) -> Callable[[str], tuple[int, ...]]:
    """Return a type for `add_argument`: several different whole numbers of at least 1.

    Args:
        example: for the error message, with a remark if need be.
    """

    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
        if min(numbers) < 1 or len(set(numbers)) < len(numbers):
            raise argparse.ArgumentTypeError(
                f"got {text}, need different whole numbers of at least 1, {example}"
            )
        return numbers

    return parse
