"""The wires of commands and benchmarks, by name."""

from __future__ import annotations

from pyengine.wire import BF16, FP8, FP16, FP32, ErrorFeedback, Int8, Wire

# Wires that round on their own rank, which error feedback needs.
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
