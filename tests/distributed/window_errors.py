"""The errors of a loop that continues with its next window after one was refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyengine as pe


@contextmanager
def noted(errors: list[str], sync: pe.Sync) -> Iterator[None]:
    """Run a window in the body; if it raises, append the error and abandon the window; else append ""."""
    try:
        yield
    except (ValueError, RuntimeError, FloatingPointError) as error:
        errors.append(str(error))
        sync.abandon()
    else:
        errors.append("")
