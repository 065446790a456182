"""What the parts of the public loop have in common: an engine, until it is closed."""

from __future__ import annotations

from typing import Protocol

from pyengine.engine.engine import Engine


class HasEngine(Protocol):
    """A part of `Sync`."""

    @property
    def _engine(self) -> Engine:
        """The engine; raises RuntimeError once it has been closed."""
