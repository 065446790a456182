"""What tests look up and change in states."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch

from pyengine.engine.snapshot import Snapshot


def content(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the part of a rank."""
    ((fields,),) = [value for name, value in state.items() if name.startswith("rank ")]
    return fields


def changed(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a state with other fields, as if it had been saved so."""
    return replace(Snapshot.read(state), **fields).to_dict()


def packed(value: Any) -> bytes:
    """Return a value as `torch.save` writes it, to be compared or loaded."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
