"""Wires by name, and bounds of their errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import pyengine as pe
from pyengine.wire.memory import BucketMemory

INT8, E4M3, E5M2 = pe.wire.Int8(block=32), pe.wire.FP8(block=32), pe.wire.FP8("e5m2", block=32)
BF16, FP16 = pe.wire.BF16(sum="fp32"), pe.wire.FP16(sum="fp32")
STOCHASTIC = pe.wire.Int8(block=32, rounding="stochastic", seed=3)
WIRES = {"bf16": BF16, "fp16": FP16, "int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
FEEDBACK = {name: pe.wire.ErrorFeedback(wire) for name, wire in WIRES.items()}
ENCODED = {name: WIRES[name] for name in ("int8", "e4m3", "e5m2")}


def terms_of(numel: int, world: int) -> list[Tensor]:
    """Return a term for each rank, with elements of different magnitudes, like gradients."""
    generator = torch.Generator().manual_seed(numel)
    size = 2.0 ** (torch.arange(numel) % 7 - 9.0)
    return [torch.randn(numel, generator=generator) * size for _ in range(world)]


def of_bucket(wire: pe.wire.Wire, numel: int) -> pe.wire.Wire:
    """Return the wire of a bucket of `numel` elements."""
    return wire.for_bucket(BucketMemory(0, numel, torch.device("cpu"), []))


def rounding(name: str, x: Tensor, largest: Tensor | float) -> Tensor:
    """Return the bound of |x - x'| that `Codec` guarantees for each element.

    Args:
        name: of the codec.
        x: the values that are encoded, or a bound of their magnitudes, in float64.
        largest: a bound of the magnitudes in x's block.
    """
    largest = torch.as_tensor(largest, dtype=torch.float64)
    scale = {"int8": largest / 127, "e4m3": largest / 448, "e5m2": largest / 57344}.get(name)
    tiny = 2.0**-110  # of a scale
    match name:
        case "int8":
            return (scale + tiny) * (0.5 + 2.0**-15) + 0 * x
        case "e4m3":
            return torch.maximum(x.abs(), (scale + tiny) * 2.0**-6) * (2.0**-4 + 2.0**-21)
        case "e5m2":
            return torch.maximum(x.abs(), (scale + tiny) * 2.0**-14) * (2.0**-3 + 2.0**-21)
        case "bf16":
            return x.abs().clamp(min=2.0**-126) * 2.0**-8
        case _:
            return x.abs().clamp(min=2.0**-14) * 2.0**-11


def sum_bound(name: str, terms: Sequence[Tensor]) -> Tensor:
    """Return a bound, for each element, of the error of a sum of float32 terms, one per rank.

    Each term is rounded. Then W terms are added in float32, with W - 1 roundings of 2^-24. Then the sum is
    rounded, whose magnitude is at most that of the terms plus their errors. The bound holds for any blocks,
    because the largest of all elements bounds those of each block.
    """
    wide = [term.double() for term in terms]
    first = sum(rounding(name, x, x.abs().max()) for x in wide)
    size = sum(x.abs() for x in wide) + first
    added = size * len(terms) * 2.0**-24
    return first + added + rounding(name, size + added, (size + added).max())
