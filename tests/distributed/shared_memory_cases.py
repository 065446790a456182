"""Helpers for tests of shared memory: training that counts reductions in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from cases import Integers, engine, windows_of_integers

from pyengine.comm.arena import Arena


class Reductions:
    """Counts the reductions in shared memory, and those of tensors in pyengine's shared memory."""

    def __init__(self) -> None:
        self.num = self.num_in_place = 0
        self._reduce = Arena.reduce

    def __enter__(self) -> Self:
        def reduce(held: Arena, flat: torch.Tensor, **options: Any) -> Any:
            self.num += 1
            self.num_in_place += "memfd:pyengine" in map_of(flat.data_ptr())
            return self._reduce(held, flat, **options)

        Arena.reduce = reduce  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Arena.reduce = self._reduce  # type: ignore[method-assign]


def map_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.partition(" ")[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return line
    return ""


def trained(kind: str, dtype: torch.dtype, **options: Any) -> tuple[int, int]:
    with Reductions() as seen:
        model = Integers(dtype)
        sync, forward = engine(kind, model, accumulate=2, **{"shared_memory": True, **options})
        windows_of_integers(sync, forward, model)
        sync.close()
    return seen.num, seen.num_in_place
