"""The numbers of an optimizer's groups, which every rank has to set alike."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from pyengine.ops.device import runs_ahead

Numbers = list[tuple[str, float]]


def numbers_of(optimizers: Sequence[Any]) -> tuple[Numbers, list[Tensor]]:
    """Return the numbers of every group, by name, and those on an accelerator, unread."""
    numbers: Numbers = []
    tensors: list[Tensor] = []
    for place, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            where = f"{place}." if len(optimizers) > 1 else ""
            for key in sorted(key for key in group if key != "params"):
                for value in _items(group[key]):
                    if isinstance(value, Tensor) and value.numel() != 1:
                        continue
                    if isinstance(value, Tensor) and runs_ahead(value.device):
                        tensors.append(value)
                    elif isinstance(value, Real | Tensor):
                        numbers.append((f"{key} of group {where}{index}", float(value)))
    return numbers, tensors


def digest(numbers: Numbers) -> int:
    """Return a digest of 62 bits."""
    raw = b"".join(struct.pack("<d", value) + name.encode() for name, value in numbers)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 2


def difference(by_rank: Sequence[Numbers]) -> str:
    """Say in which number ranks differ first, and who has what."""
    for row in zip(*by_rank, strict=False):
        if len(set(row)) > 1:
            values = "; ".join(f"rank {rank}: {value:g}" for rank, (_, value) in enumerate(row))
            return f"{row[0][0]} differs ({values})"
    if len({len(numbers) for numbers in by_rank}) > 1:
        return "ranks have other param_groups"
    return "a number that lies on the device differs"


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)
