"""How wires print: as they are made, without what was left out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Spelled:
    """A frozen dataclass that prints the arguments that are not its defaults. Ranks compare it."""

    def __repr__(self) -> str:
        mine: Any = self
        given = [(f.name, getattr(self, f.name)) for f in fields(mine) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"
