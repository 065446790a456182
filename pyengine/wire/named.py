"""Names and dtypes that a user may pass instead of a wire."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from pyengine.wire.base import Wire
from pyengine.wire.cast import BF16, FP16, FP32
from pyengine.wire.encoded import FP8, Int8
from pyengine.wire.error_feedback import ErrorFeedback

WireName: TypeAlias = Literal[
    "fp32",
    "bf16",
    "fp16",
    "bf16-sum-fp32",
    "fp16-sum-fp32",
    "int8",
    "fp8-e4m3",
    "fp8-e5m2",
    "bf16-sum-fp32-ef",
    "fp16-sum-fp32-ef",
    "int8-ef",
    "fp8-e4m3-ef",
    "fp8-e5m2-ef",
]
WireLike: TypeAlias = Wire | WireName | torch.dtype

# Wires whose rounding error is known on each rank, as error feedback requires.
_FED_BACK: dict[str, Wire] = {
    "bf16-sum-fp32": BF16(sum="fp32"),
    "fp16-sum-fp32": FP16(sum="fp32"),
    "int8": Int8(),
    "fp8-e4m3": FP8("e4m3"),
    "fp8-e5m2": FP8("e5m2"),
}
WIRES: dict[str, Wire] = {
    "fp32": FP32(),
    "bf16": BF16(),
    "fp16": FP16(),
    **_FED_BACK,
    **{f"{name}-ef": ErrorFeedback(wire) for name, wire in _FED_BACK.items()},
}
_OF_DTYPE: dict[torch.dtype, Wire] = {kind.dtype: kind() for kind in (FP32, BF16, FP16)}


def as_wire(wire: WireLike) -> Wire:
    """Return the wire for a name or a dtype; return any other value unchanged."""
    if isinstance(wire, str):
        return WIRES.get(wire, wire)  # type: ignore[arg-type]
    return _OF_DTYPE.get(wire, wire) if isinstance(wire, torch.dtype) else wire  # type: ignore[arg-type]


def wire_problems(wire: Any) -> list[str]:
    """Describe why a wire cannot be used."""
    if isinstance(wire, Wire):
        return []
    if isinstance(wire, type) and issubclass(wire, Wire):
        return [f"wire={wire.__name__} is a class: pass an instance, for example {wire.__name__}()"]
    if callable(getattr(wire, "all_reduce_", None)):
        return [f"wire={wire!r}: {type(wire).__name__} is not a subclass of pe.wire.Wire: make it one"]
    return [
        (
            f"wire={wire!r}: expected a wire, for example pe.wire.BF16() or "
            f"pe.wire.ErrorFeedback(pe.wire.Int8()); one of the names {', '.join(WIRES)}; or torch.float32, "
            "torch.bfloat16 or torch.float16"
        )
    ]
