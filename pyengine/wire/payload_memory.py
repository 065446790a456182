"""Memory in which what is made of a bucket travels, kept from one window to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead


class PayloadMemory:
    """Memory of one bucket for the sums that need some while they are under way.

    A sum takes it, and gives it back behind its last collective. One that breaks off before never does, as a
    collective may be under way there: the next one has memory of its own. On an accelerator nothing is kept,
    since its allocator has no pages to fault in, and keeps what is freed by stream.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Tensor] = {}

    def take(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory, uint8 `[num_bytes]`, the caller's until it is given back.

        Args:
            name: what it is for, within a sum.
            num_bytes, device: of it.

        Returns:
            Zeros; or what was given back by this name, as it was.
        """
        kept = self._kept.pop((name, num_bytes), None)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device) if kept is None else kept

    def give_back(self, **taken: Tensor) -> None:
        """Keep memory for the next sum: by name, uint8, in which nothing is under way."""
        for name, memory in taken.items():
            if not runs_ahead(memory.device):
                self._kept[name, memory.numel()] = memory
