"""Memory and tensors that are drawn for an op: valid ones, unusual ones, and some that share memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from draw import Draw
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
# Special values, which are placed among ordinary numbers.
SPECIAL = (float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, 6e-8, 65520.0, 3.4e38)


MOST = 2**18  # most elements of a tensor; it is too small if a plan needs more


class Subclass(Tensor):
    """A plain subclass, whose elements are stored at its address."""


class Memory:
    """The memory of all tensors of one case; equal draws give equal bits."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.pieces: list[Tensor] = []

    def content(self) -> list[Tensor]:
        """Return a copy of every piece; the copy is empty if the piece has lost its memory."""
        return [torch.empty(0) if _is_cut(piece) else piece.detach().clone() for piece in self.pieces]

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return new memory of exactly this size (at most MOST); small pieces may begin at any byte."""
        draw, numel = self._draw, min(numel, MOST)
        if draw.once_in(16) and 0 < numel < 2**12:
            piece = torch.frombuffer(
                bytearray(numel * dtype.itemsize + 3), dtype=dtype, count=numel, offset=draw.below(4)
            )
        else:
            piece = torch.empty(numel, dtype=dtype)
        self._fill(piece)
        self.pieces.append(piece)
        return piece

    def flat(self, numel: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        return self.tensor(numel + self._draw.pick((0, 0, 1, 5)), dtypes)

    def tensor(self, numel: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        draw = self._draw
        if draw.once_in(12):
            return draw.pick(ODD)(self, numel, dtypes[0])
        dtype = draw.pick(dtypes)
        if draw.once_in(6) and self.pieces:
            found = self._shared(numel, dtype)
            if found is not None:
                return found
        shift = draw.pick((0, 0, 1, 3))
        return self.new(numel + shift, dtype)[shift:]

    def scale(self) -> Tensor:
        """Return a scale, which is sometimes invalid."""
        draw = self._draw
        if draw.once_in(16):
            return draw.pick((self.tensor(1, DTYPES), torch.ones((), dtype=torch.float64), 1.0))  # type: ignore[return-value]
        if draw.once_in(16) and self.pieces and (inside := self._shared(1, torch.float32)) is not None:
            return inside[0]
        return torch.tensor(draw.pick((1.0, 0.3, -2.0, 0.0, float("inf"), float("nan"), 1e-40, 3e38)))

    def _shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a view into an existing piece, or None if it does not fit."""
        piece = self._draw.pick(self.pieces)
        if piece.dtype.itemsize * piece.numel() % dtype.itemsize or piece.storage_offset() or _is_cut(piece):
            return None
        seen = piece if piece.dtype == dtype else piece.view(torch.uint8).view(dtype)
        if seen.numel() < numel:
            return None
        begin = self._draw.below(seen.numel() - numel + 1)
        return seen[begin : begin + numel]

    def _fill(self, piece: Tensor) -> None:
        start, binade = self._draw.byte(), self._draw.pick((0, -20, 11, -130))
        values = torch.arange(start, start + piece.numel(), dtype=torch.float32).remainder_(31).sub_(15)
        piece.copy_(values.mul_(2.0**binade))
        if piece.numel() and self._draw.once_in(4):
            index = self._draw.below(piece.numel())
            if piece.is_floating_point():
                piece[index] = self._draw.pick(SPECIAL)


def _is_cut(piece: Tensor) -> bool:
    return piece.untyped_storage().nbytes() < (piece.storage_offset() + piece.numel()) * piece.itemsize


def _resized(memory: Memory, numel: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.ones(numel, dtype=dtype)
    tensor.untyped_storage().resize_(memory._draw.below(numel * dtype.itemsize + 1))
    return tensor


# Arguments that no op accepts, and some that only look unusual.
ODD: tuple[Callable[[Memory, int, torch.dtype], Tensor], ...] = (
    lambda memory, numel, dtype: memory.new(numel + 1, dtype),
    lambda memory, numel, dtype: memory.new(max(0, numel - 1), dtype),
    lambda memory, numel, dtype: memory.new(numel, memory._draw.pick(OTHERS[:3])),
    lambda memory, numel, dtype: torch.zeros(numel, dtype=memory._draw.pick(OTHERS)),
    lambda memory, numel, dtype: memory.new(2 * numel, dtype)[::2],
    lambda memory, numel, dtype: memory.new(1, dtype).expand(numel),
    lambda memory, numel, dtype: memory.new(2 * min(numel, MOST // 2), dtype).unflatten(0, (2, -1)).t(),
    lambda memory, numel, dtype: memory.new(numel, dtype).view(1, numel, 1),
    lambda memory, numel, dtype: torch.empty(numel, dtype=dtype, device="meta"),
    lambda memory, numel, dtype: torch._neg_view(torch.ones(numel, dtype=dtype)),
    lambda memory, numel, dtype: torch._efficientzerotensor(numel, dtype=dtype),
    lambda memory, numel, dtype: torch.zeros(numel, dtype=dtype).to_sparse(),
    _resized,
    lambda memory, numel, dtype: memory.new(numel, dtype).as_subclass(Subclass),
    lambda memory, numel, dtype: torch.nn.Parameter(memory.new(numel, dtype), dtype.is_floating_point),
    lambda memory, numel, dtype: memory.new(numel, dtype).requires_grad_(dtype.is_floating_point),
    lambda memory, numel, dtype: memory._draw.pick((3, "x", [], object)),  # type: ignore[arg-type, return-value]
)
