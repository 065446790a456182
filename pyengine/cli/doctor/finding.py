"""What a check of `doctor` has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One fact about this machine or installation.

    Attributes:
        name: of the thing looked at.
        status: "ok"; "warn", if it works but slower or not everywhere; "fail", if it does not work.
        text: what was found.
        remedy: how to mend it; empty if there is nothing to mend.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(name, "ok", text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that works, but slower or not everywhere."""
    return Finding(name, "warn", text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(name, "fail", text, remedy)
