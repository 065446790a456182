"""Reference implementation of `Codec` in plain PyTorch. csrc/codec.h has the rules and their proofs.

This implementation produces the same bits as the native core. Builds without the core, and devices other than
CPU and CUDA, use this implementation. `codec.py` has checked the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pyengine.ops.device import HOST

MIN_SCALE = 2.0**-110  # For smaller scales, 1/scale or a small code would leave float32's normal range.
_INFINITY = 0x7F800000  # Bits of a float32 infinity; with the sign cleared, only NaN has larger bits.
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class ValueFormat:
    """The properties of a code format."""

    code: int  # Number of the format in the native core.
    num_bytes: int  # Size of a code.
    largest: float  # Largest finite magnitude.
    max_scale: float | None  # Largest float32 whose product with `largest` is finite; None without scales.
    nan: int  # Code of NaN.
    infinity: int  # Code of +inf; the code of NaN if the format has no infinities.
    mantissa: int = -1  # Number of stored mantissa bits; -1 for integers.
    bias: int = 0  # Exponent bias.


FORMATS: Mapping[str, ValueFormat] = {
    "int8": ValueFormat(0, 1, 127, float.fromhex("0x1.020406p+121"), 0x80, 0x80),
    "e4m3": ValueFormat(1, 1, 448, float.fromhex("0x1.249248p+119"), 0x7F, 0x7F, 3, 7),
    "e5m2": ValueFormat(2, 1, 57344, float.fromhex("0x1.249248p+112"), 0x7F, 0x7C, 2, 15),
    "bf16": ValueFormat(3, 2, float.fromhex("0x1.fep+127"), None, 0x7FC0, 0x7F80, 7, 127),
    "fp16": ValueFormat(4, 2, 65504, None, 0x7E00, 0x7C00, 10, 15),
}


@dataclass(frozen=True)
class Layout:
    """The layout of a payload: float32 scales of all blocks, then the codes."""

    format: ValueFormat
    block: int
    numel: int

    @property
    def num_blocks(self) -> int:
        return 0 if self.format.max_scale is None else -(-self.numel // self.block)

    def scales(self, payload: Tensor) -> Tensor:
        """Return a view of the scales, as float32 `[num_blocks]`."""
        if self.num_blocks == 0:  # a payload of two-byte codes may be misaligned for float32
            return payload.new_empty(0, dtype=torch.float32)
        return payload[: 4 * self.num_blocks].view(torch.float32)

    def codes(self, payload: Tensor) -> Tensor:
        """Return a view of the codes, as uint8 or int16 `[numel]`."""
        first = 4 * self.num_blocks
        codes = payload[first : first + self.numel * self.format.num_bytes]
        return codes if self.format.num_bytes == 1 else codes.view(torch.int16)


# The key of the hash (None for rounding to nearest, ties to even) and the index of the first element.
Chance: TypeAlias = tuple[tuple[int, int] | None, int]


@torch.no_grad()
def encode_(layout: Layout, payload: Tensor, values: Tensor, residual: Tensor | None, chance: Chance) -> None:
    """Encode `values + residual` into `payload`, and write the error into `residual`."""
    x = values if residual is None else values + residual
    error = _encode(layout, payload, x, chance)
    if residual is not None:
        residual.copy_(error)


@torch.no_grad()
def sum_encode_(
    layout: Layout, out: Tensor, payloads: Tensor, residual: Tensor | None, chance: Chance
) -> None:
    """Encode the sum of all payloads into `out`, and add the error to `residual`."""
    error = _encode(layout, out, _total(layout, payloads), chance)
    if residual is not None:
        residual.add_(error)


@torch.no_grad()
def sum_(layout: Layout, out: Tensor, payloads: Tensor) -> None:
    out.copy_(_total(layout, payloads))


def _encode(layout: Layout, payload: Tensor, x: Tensor, chance: Chance) -> Tensor:
    """Encode x into `payload`; return the error x - decoded, or 0 where the decoded value is not finite."""
    payload.zero_()
    layout.scales(payload).copy_(_scales(layout, x))
    scales = layout.scales(payload)
    inverse = torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0)
    y = x.masked_fill(~x.isfinite(), 0) * _spread(layout, inverse)
    key, offset = chance
    random = None if key is None else hashed(key, offset, layout.numel, x.device)
    layout.codes(payload).copy_(_codes(layout.format, x, y, random))
    decoded = _decode(layout, payload)
    return torch.where(decoded.isfinite(), x - decoded, 0.0)


def _decode(layout: Layout, payload: Tensor) -> Tensor:
    codes, form = layout.codes(payload), layout.format
    if form.max_scale is None:
        return codes.view(torch.bfloat16 if form.mantissa == 7 else torch.float16).to(torch.float32)
    values = [_meaning(form, code) for code in range(256)]
    table = torch.tensor(values, dtype=torch.float32, device=payload.device)
    return table[codes.to(torch.int64)] * _spread(layout, layout.scales(payload))


def _total(layout: Layout, payloads: Tensor) -> Tensor:
    total = _decode(layout, payloads[0])
    for payload in payloads[1:]:
        total += _decode(layout, payload)
    return total


def hashed(key: tuple[int, int], offset: int, numel: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element, as int64 `[numel]`.

    The hash is Wellons' lowbias32, with one half of the key mixed in before each multiplication.
    """
    x = (torch.arange(offset, offset + numel, dtype=torch.int64, device=device) & _LOW) ^ key[0]
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = (((x ^ (x >> 15)) ^ key[1]) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _spread(layout: Layout, of_blocks: Tensor) -> Tensor | float:
    if layout.format.max_scale is None:
        return 1.0
    return of_blocks.repeat_interleave(layout.block)[: layout.numel]


def _scales(layout: Layout, x: Tensor) -> Tensor:
    """Return the scales of all blocks.

    A nonfinite element counts as the smallest denormal, so that it does not enlarge the scale of its block
    and the scale is not 0.
    """
    if layout.format.max_scale is None:
        return x[:0]
    bits = _magnitude(x)
    bits = torch.where(bits < _INFINITY, bits, 1)
    bits = torch.nn.functional.pad(bits, (0, layout.num_blocks * layout.block - layout.numel))
    largest = bits.view(layout.num_blocks, layout.block).amax(1).view(torch.float32)
    # Divide by a tensor, because some devices multiply by the reciprocal if the divisor is a Python number.
    scales = largest / torch.full_like(largest, layout.format.largest)
    return torch.where(largest.view(torch.int32) == 0, 0.0, scales.clamp(MIN_SCALE, layout.format.max_scale))


def _magnitude(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


def _codes(form: ValueFormat, x: Tensor, y: Tensor, random: Tensor | None) -> Tensor:
    """Return the codes of y = x / scale as integers that wrap when stored; y is 0 where x is nonfinite."""
    magnitude = _magnitude(x)
    infinity: Tensor | int = form.infinity
    if form.mantissa < 0:
        finite = _integers(y, random)
    else:
        sign = torch.where(x.view(torch.int32) < 0, 1 << (8 * form.num_bytes - 1), 0)
        finite = _floats(form, y.abs(), random) | sign
        infinity = infinity | sign if form.infinity != form.nan else form.nan
    codes = torch.where(magnitude < _INFINITY, finite, infinity)
    return torch.where(magnitude > _INFINITY, form.nan, codes)


def _integers(y: Tensor, random: Tensor | None) -> Tensor:
    if random is None:
        return y.round().to(torch.int32)  # ties to even; at most 127, because y exceeds 127 by at most 2^-16
    steps = ((y.abs() * 2.0**24).to(torch.int64) + (random >> 8)) >> 24
    return torch.where(y < 0, -steps, steps).clamp(-127, 127)


def _floats(form: ValueFormat, y: Tensor, random: Tensor | None) -> Tensor:
    """Return the codes of magnitudes as int64."""
    cut = 23 - form.mantissa  # number of mantissa bits to remove from float32
    if form.max_scale is not None:
        y = y.clamp(max=form.largest)
    bits = y.view(torch.int32).to(torch.int64)
    normal = bits - ((127 - form.bias) << 23)
    shift = form.bias + form.mantissa - 1  # the smallest denormal is 2^-shift
    if random is None:
        codes = (normal + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut
        # Adding a power of two whose ulp is 2^-shift rounds y, because the sum has no smaller bits.
        tiny = (y + 2.0 ** (23 - shift)).view(torch.int32).to(torch.int64) - ((150 - shift) << 23)
    else:
        chance = random >> (32 - cut)
        codes = (normal + chance) >> cut
        tiny = ((y * 2.0 ** min(shift + cut, 127)).to(torch.int64) + chance) >> cut
    if form.bias < 127:  # bfloat16 has float32's denormals
        codes = torch.where(bits < ((128 - form.bias) << 23), tiny, codes)
    # Stochastic rounding produces no infinities. A value beyond the last tie becomes infinite, as in a cast
    # to the format.
    largest = int(torch.tensor(form.largest, dtype=torch.float32, device=HOST).view(torch.int32))
    codes = codes.clamp(max=(largest - ((127 - form.bias) << 23)) >> cut)
    return torch.where(bits >= largest + (1 << (cut - 1)), form.infinity, codes)


def _meaning(form: ValueFormat, code: int) -> float:
    if form.mantissa < 0:
        return float("nan") if code == form.nan else float(code - 256 if code > 128 else code)
    magnitude, sign = code & 0x7F, -1.0 if code & 0x80 else 1.0
    if magnitude >= form.infinity:
        is_infinite = magnitude == form.infinity != form.nan
        return sign * float("inf") if is_infinite else float("nan")
    exponent, fraction = divmod(magnitude, 1 << form.mantissa)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - form.bias - form.mantissa)
    return sign * ((1 << form.mantissa) + fraction) * 2.0 ** (exponent - form.bias - form.mantissa)
