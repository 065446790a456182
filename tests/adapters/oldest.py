"""The oldest releases that the extra `adapters` allows, as requirements for pip."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def oldest() -> list[str]:
    """Return a requirement for the oldest release of each library in the extra."""
    (extra,) = re.findall(r"^adapters = \[(.*)\]$", PROJECT.read_text(), re.MULTILINE)
    return [f"{name}=={release}" for name, release in re.findall(r'"(\w+)>=([\d.]+)', extra)]


if __name__ == "__main__":
    print(*oldest())
