"""Arguments that several commands share: types, checks, and settings built from options."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyengine.cli.files import regular
from pyengine.comm.launching import check_number

_Settings = TypeVar("_Settings")


class Conflict(ValueError):
    """An error in arguments that are valid individually, but not together or on this machine."""


def fill(settings: type[_Settings], options: argparse.Namespace, **values: Any) -> _Settings:
    """Build a command's settings from `values`, and take all other fields from the options."""
    names = [field.name for field in fields(settings) if field.name not in values]  # type: ignore[arg-type]
    return settings(**values, **{name: getattr(options, name) for name in names})


@contextmanager
def writing(argument: str, what: str, remedy: str = "name a writable folder") -> Iterator[None]:
    """Raise `Conflict` if the body raises OSError; `what` describes the body in the error message."""
    try:
        yield
    except OSError as error:
        raise Conflict(f"argument {argument}: cannot {what} ({error.strerror}): {remedy}") from None


def check_writable(argument: str, file: Path) -> None:
    """Raise `Conflict` if `files.written` could not write a file, or would replace a non-regular file."""
    with writing(argument, f"write {file}", "name a file in a folder that exists and is writable"):
        with suppress(FileNotFoundError):
            open(file, "rb", opener=regular).close()
        tempfile.TemporaryDirectory(dir=file.parent).cleanup()


def check_absent(options: argparse.Namespace, name: str, why: str) -> None:
    """Raise `Conflict` if an argument is given that other arguments exclude."""
    got = getattr(options, name)
    if got is not None:
        text = ",".join(map(str, got)) if isinstance(got, tuple) else got
        raise Conflict(f"argument --{name.replace('_', '-')}: got {text} {why}")


def check_workers(numbers: Collection[int]) -> None:
    """Raise `Conflict` if this machine has too few cores for the largest number of workers."""
    try:
        check_number(max(numbers))
    except ValueError as error:
        raise Conflict(f"argument --workers: {error}") from None


def each(defaults: Mapping[str, float]) -> str:
    """Describe a default value that differs between models."""
    return "default: " + ", ".join(f"{model} {value:g}" for model, value in defaults.items())


def counts(parser: argparse.ArgumentParser, least: int = 1) -> Callable[..., argparse.Action]:
    """Return `parser.add_argument`, preset for whole numbers of at least `least`."""
    return partial(parser.add_argument, type=whole(least), metavar="N")


def whole(least: int) -> Callable[[str], int]:
    """Return a type for `add_argument` that accepts whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least {least}")
        if value >= 2**63:
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number below 2**63")
        return value

    return parse


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, expected a finite number above 0")
    return value


def different_wholes(text: str) -> tuple[int, ...]:
    """Parse distinct whole numbers, separated by commas."""
    parts = text.split(",")
    # Long numbers count as 0, because `int` raises ValueError for thousands of digits.
    numbers = tuple(int(part) if part.isdecimal() and len(part) < 10 else 0 for part in parts)
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(
            f"got {text}, expected different whole numbers of at least 1, for example 1,2,4"
        )
    return numbers


def different_names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a type for `add_argument` that accepts distinct names from `known`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(known) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"got {text}, expected different names from {', '.join(known)}")
        return names

    return parse
