"""Marks that say where a test runs."""

from __future__ import annotations

from typing import Any

import pytest


def rest(*values: Any) -> list[Any]:
    """Return values of a test's argument that only `make faults` takes: further places of what the other
    values show already. A tuple is the values of several arguments.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]
