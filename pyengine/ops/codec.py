"""`Codec`: quantization of values to one or two bytes with one scale per block, and sums of quantized values.

Each op is one pass over memory. An op either quantizes values, optionally with a residual for error feedback,
or adds the payloads of several ranks and quantizes the sum. The results have the same bits with every
instruction set and thread count, on every GPU, and in plain PyTorch.

A payload is a uint8 tensor: the float32 scales of all blocks, then one code per element, then zero padding to
a multiple of four bytes. The padding decodes to zeros. bf16 and fp16 payloads have neither scales nor
padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyengine.ops import codec_reference, cuda, native
from pyengine.ops.codec_reference import FORMATS, Layout
from pyengine.ops.overlap import check_apart
from pyengine.ops.pointers import (
    DTYPE_CODES,
    MAX_NUMEL,
    check_aligned,
    check_each,
    check_rows,
    check_tensor,
    device_of,
)

_BLOCKS = (32, 64, 128, 256, 512, 1024)
_FLOAT32 = (torch.float32,)
_OUT = tuple(DTYPE_CODES)


@dataclass(frozen=True)
class Codec:
    """A format that stores float32 values in one or two bytes each.

    Each block of `block` consecutive elements shares a float32 scale: the largest finite magnitude in the
    block, divided by the largest value of a code. The table contains error bounds, in which x is a finite
    value, x' is its decoded value, and s is the scale of its block:

    | format | codes | maximum of abs(x - x') if rounded to nearest | if rounded stochastically |
    |---|---|---|---|
    | int8 | -127 to 127, and NaN | s (2^-1 + 2^-15) | s (1 + 2^-14) |
    | e4m3 | up to 448, and NaN | max(abs(x), s 2^-6) (2^-4 + 2^-21) | twice as much |
    | e5m2 | up to 57344, infinities and NaN | max(abs(x), s 2^-14) (2^-3 + 2^-21) | twice as much |
    | bf16 | bfloat16 | max(abs(x), 2^-126) 2^-8 | twice as much |
    | fp16 | float16 | max(abs(x), 2^-14) 2^-11 | twice as much |

    Scales are at least 2^-110, so tiny values are lost; the scale of a block of zeros is 0. A nonfinite
    element does not affect other elements. NaN stays NaN, and infinity becomes NaN if the format cannot
    represent it. A finite element becomes infinite only in bf16 and fp16, and only if a cast would also make
    it infinite.

    Stochastic rounding rounds up or down with probabilities that make x' unbiased, using a hash of the seed
    and the element index. Equal seeds produce equal bits. Two elements whose indices differ by 2^32 use the
    same random bits.

    Args:
        format: one of "int8", "e4m3", "e5m2", "bf16", "fp16".
        block: number of elements that share a scale: 32, 64, 128, 256, 512 or 1024; 1 for bf16 and fp16,
            which have no scales. If a chunk of a bucket begins at a multiple of `block`, its codes and scales
            are the same as in the whole bucket.

    All tensors must be contiguous and on the same device (a matrix of payloads needs only contiguous rows). A
    tensor that is written must not share memory with other tensors. A payload must begin at a multiple of
    four bytes (two for bf16 and fp16). The caller owns all memory.

    Raises:
        ValueError, TypeError: from the constructor and every method, for invalid arguments; raised before
            anything is written.

    Example:
        >>> codec = Codec("int8", block=32)
        >>> values = torch.tensor([127.0, -3.0, 0.6])
        >>> payload = torch.empty(codec.num_bytes(3), dtype=torch.uint8)
        >>> codec.encode_(payload, values)
        >>> codec.decode_(values, payload)
        >>> values
        tensor([127.,  -3.,   1.])
    """

    format: str
    block: int = 1

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}; expected one of {', '.join(map(repr, FORMATS))}")
        if self._has_scales and self.block not in _BLOCKS:
            raise ValueError(
                f"block={self.block!r}; expected one of {', '.join(map(str, _BLOCKS))}, the number of "
                "elements that share a scale"
            )
        if not self._has_scales and self.block != 1:
            raise ValueError(f"block={self.block!r}; {self.format} has no scales, so do not pass block")

    def num_bytes(self, numel: int) -> int:
        """Return the size in bytes of a payload of `numel` elements, which may end with a short block.

        `numel` is 0 to 2**40.

        Example:
            >>> Codec("int8", block=256).num_bytes(257)
            268
            >>> Codec("bf16").num_bytes(3)
            6
        """
        numel = operator.index(numel)
        if not 0 <= numel <= MAX_NUMEL:
            raise ValueError(f"numel={numel}; expected 0 to 2**40")
        if not self._has_scales:
            return 2 * numel
        return 4 * (-(-numel // self.block) + -(-numel // 4))

    def encode_(
        self,
        payload: Tensor,
        values: Tensor,
        *,
        residual: Tensor | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """Encode `values`, or encode `values + residual` and store the error in `residual`.

        Args:
            payload: uint8 [num_bytes(n)], written.
            values: float32 [n], read.
            residual: float32 [n], read, then overwritten with the rounding error x - x', where x is `values +
                residual` and x' is the decoded value. The error is 0 if x or x' is nonfinite.
            seed: int64 seed of stochastic rounding. If None, values are rounded to nearest, ties to even.
            offset: nonnegative index of the first element, used in the hash of the seed.

        Cost: the op reads 4 bytes and writes 1 byte per element (2 bytes for bf16 and fp16). A residual adds
            a read and a write of 4 bytes per element. Each block also has a scale of 4 bytes. Every
            replay of a CUDA graph uses the seed that was passed during the capture.

        Example:
            >>> codec, values, residual = Codec("int8", block=32), torch.tensor([127.0, 0.6]), torch.zeros(2)
            >>> payload = torch.empty(codec.num_bytes(2), dtype=torch.uint8)
            >>> codec.encode_(payload, values, residual=residual)
            >>> residual
            tensor([ 0.0000, -0.4000])
        """
        device = device_of("values", values)
        check_tensor("values", values, _FLOAT32, 0, device)
        numel = values.numel()
        self._check_payload("payload", payload, numel, device)
        if residual is not None:
            check_each("residual", residual, torch.float32, numel, device, of="element of values")
        key, offset = _checked_key(seed), _checked_offset(offset, numel)
        check_apart([("payload", payload), ("residual", residual)], [("values", values)])
        if numel == 0:
            return
        layout = Layout(FORMATS[self.format], self.block, numel)
        runner = _runner(device)
        if runner is None:
            return codec_reference.encode_(layout, payload, values, residual, (key, offset))
        addresses = (payload.data_ptr(), values.data_ptr(), _address(residual))
        runner("codec_encode", _native(layout), *addresses, key, offset)

    def sum_encode_(
        self,
        out: Tensor,
        payloads: Tensor,
        numel: int,
        *,
        residual: Tensor | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        """Decode W payloads, add them in float32 in order, and encode the sum.

        Args:
            out: uint8 [num_bytes(n)], written.
            payloads: uint8 [W, num_bytes(n)], read; W is at least 1. Each contiguous row is the payload of
                one rank for the same n elements.
            numel: n, the number of elements.
            residual: float32 [n], to which the rounding error is added: the sum minus x', where x' is the
                decoded `out`. An element stays unchanged if its sum or x' is nonfinite.
            seed, offset: see `encode_`.

        Cost: the op reads W bytes and writes 1 byte per element (twice as many for bf16 and fp16). A residual
            adds a read and a write of 4 bytes per element.

        Example:
            >>> codec = Codec("int8", block=32)
            >>> payloads = torch.empty(2, codec.num_bytes(2), dtype=torch.uint8)
            >>> for payload in payloads:
            ...     codec.encode_(payload, torch.tensor([127.0, 2.0]))
            >>> out, values = torch.empty_like(payloads[0]), torch.empty(2)
            >>> codec.sum_encode_(out, payloads, 2)
            >>> codec.decode_(values, out)
            >>> values
            tensor([254.,   4.])
        """
        device = device_of("out", out)
        self._check_payload("out", out, numel, device)
        span = self._check_rows(payloads, out.numel(), device)
        if residual is not None:
            check_each("residual", residual, torch.float32, numel, device, of="element")
        key, offset = _checked_key(seed), _checked_offset(offset, numel)
        check_apart([("out", out), ("residual", residual)], [("payloads", span)])
        if numel == 0:
            return
        layout = Layout(FORMATS[self.format], self.block, numel)
        runner = _runner(device)
        if runner is None:
            return codec_reference.sum_encode_(layout, out, payloads, residual, (key, offset))
        addresses = (out.data_ptr(), payloads.data_ptr(), _rows(payloads), _address(residual))
        runner("codec_sum_encode", _native(layout), *addresses, key, offset)

    def sum_(self, out: Tensor, payloads: Tensor) -> None:
        """Decode W payloads, and add them in float32 in order.

        Args:
            out: float32, bfloat16 or float16 [n], written; 16-bit dtypes receive the sum rounded to nearest.
            payloads: uint8 [W, num_bytes(n)], read; W is at least 1.

        Cost: the op reads W bytes per element (2 W for bf16 and fp16), and writes `out` once.

        Example:
            >>> codec = Codec("bf16")
            >>> payloads, out = torch.ones(2, 3, dtype=torch.bfloat16).view(torch.uint8), torch.empty(3)
            >>> codec.sum_(out, payloads)
            >>> out
            tensor([2., 2., 2.])
        """
        device = device_of("out", out)
        check_tensor("out", out, _OUT, 0, device)
        span = self._check_rows(payloads, self.num_bytes(out.numel()), device)
        check_apart([("out", out)], [("payloads", span)])
        if out.numel() == 0:
            return
        layout = Layout(FORMATS[self.format], self.block, out.numel())
        runner = _runner(device)
        if runner is None:
            return codec_reference.sum_(layout, out, payloads)
        addresses = (out.data_ptr(), DTYPE_CODES[out.dtype], payloads.data_ptr(), _rows(payloads))
        runner("codec_sum", _native(layout), *addresses)

    def decode_(self, values: Tensor, payload: Tensor) -> None:
        """Decode a payload.

        Args:
            values: float32, bfloat16 or float16 [n], written.
            payload: uint8 [num_bytes(n)], read.

        Cost: the op reads 1 byte per element (2 for bf16 and fp16), and writes `values` once.

        Example:
            >>> values = torch.empty(2)
            >>> Codec("fp16").decode_(values, torch.ones(2, dtype=torch.float16).view(torch.uint8))
            >>> values
            tensor([1., 1.])
        """
        device = device_of("values", values)
        check_tensor("values", values, _OUT, 0, device)
        self._check_payload("payload", payload, values.numel(), device)
        self.sum_(values, payload.view(1, -1))

    @property
    def _has_scales(self) -> bool:
        return FORMATS[self.format].max_scale is not None

    @property
    def _alignment(self) -> int:
        return 4 if self._has_scales else 2

    def _check_payload(self, name: str, payload: Tensor, numel: int, device: torch.device) -> None:
        check_tensor(name, payload, (torch.uint8,), 0, device)
        if payload.numel() != self.num_bytes(numel):
            raise ValueError(
                f"{name} has {payload.numel()} bytes; expected {self.num_bytes(numel)}, which is "
                f"num_bytes({numel}) of {self}"
            )
        check_aligned(name, payload, self._alignment)

    def _check_rows(self, payloads: Tensor, num_bytes: int, device: torch.device) -> Tensor:
        """Check the payloads, and return a view of the memory from the first to the last payload."""
        span = check_rows("payloads", payloads, torch.uint8, num_bytes, device)
        check_aligned("payloads", payloads, self._alignment)
        if payloads.shape[0] > 1:  # rows are equally spaced, so checking two is enough
            check_aligned("payloads[1]", payloads[1], self._alignment)
        return span


def _native(layout: Layout) -> native._core.Codec:
    return native._core.Codec(layout.format.code, layout.block, layout.numel)


def _runner(device: torch.device) -> Callable[..., None] | None:
    """Return a function that calls a native function by name on `device`, or None for plain PyTorch."""
    if device.type == "cpu":
        core = native.core()
        return None if core is None else lambda function, *arguments: getattr(core, function)(*arguments)
    return partial(cuda.run, device) if device.type == "cuda" and native.cuda_core() else None


def _rows(payloads: Tensor) -> tuple[int, int]:
    """Return the number of payloads and the distance between them in bytes."""
    return payloads.shape[0], payloads.stride(0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _checked_key(seed: int | None) -> tuple[int, int] | None:
    """Return the two 32-bit words of the hash key, or None without a seed."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, or None to round to nearest; got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed}; expected an int64, from -2**63 to 2**63 - 1")
    key = mixed(seed)
    return key & 0xFFFFFFFF, key >> 32


def mixed(word: int) -> int:
    """Return a 64-bit hash of `word` (splitmix64; Steele, Lea, Flood 2014)."""
    last = 2**64 - 1
    z = (word + 0x9E3779B97F4A7C15) & last
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & last
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & last
    return z ^ (z >> 31)


def _checked_offset(offset: int, numel: int) -> int:
    offset = operator.index(offset)
    if not 0 <= offset <= MAX_NUMEL - numel:
        raise ValueError(
            f"offset={offset}; expected 0 to {MAX_NUMEL - numel}, so that the last index is below 2**40"
        )
    return offset
