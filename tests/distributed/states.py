"""What tests look up and change in states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyengine.checkpoint.snapshot import Snapshot


def content(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the only part of a state."""
    ((fields, _),) = [value for name, value in state.items() if name.startswith("rank ")]
    return fields


def changed(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a state with other fields, as if it had been saved so."""
    (snapshot,) = Snapshot.read(state)
    return replace(snapshot, **fields).to_dict()


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as version 1 wrote it: all fields side by side, and no checksum."""
    return {"version": 1, **content(state)}
