"""Marks that say where a test runs."""

from __future__ import annotations

from typing import Any

import pytest


def rest(*values: Any) -> list[Any]:
    """Return argument values that only `make faults` runs, because the test's other values show the same.

    A tuple holds the values of several arguments.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]
