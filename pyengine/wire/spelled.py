"""How wires print: as the call that makes them, without default arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Spelled:
    """A frozen dataclass whose repr has no default arguments. Ranks compare this repr."""

    def __repr__(self) -> str:
        mine: Any = self
        given = [(f.name, getattr(self, f.name)) for f in fields(mine) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"
