"""The result of a check of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One fact about this machine or installation.

    Attributes:
        name: of the check.
        status: "ok"; "warn": works, but slower or not everywhere; "fail": does not work.
        text: the result.
        remedy: what to do; empty for "ok".
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "warn", text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "fail", text, remedy)
