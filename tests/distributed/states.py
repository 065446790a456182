"""Helpers that read and change states."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch

from pyengine.engine.snapshot import Snapshot


def content(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the only rank part of a state."""
    ((fields,),) = [value for name, value in state.items() if name.startswith("rank ")]
    return fields


def changed(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a copy of a state with other values of some fields, as if it had been saved with them."""
    return replace(Snapshot.read(state), **fields).to_dict()


def packed(value: Any) -> bytes:
    """Return the bytes that `torch.save` writes for a value, to be compared or loaded."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
