"""Memory of encoded buckets, kept from one window to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead


class PayloadMemory:
    """Buffers of one bucket for the collectives of a sum.

    A sum allocates them, and frees them after its last collective. A sum that fails never frees them, because
    a collective may still use them; the next sum then gets new memory. On an accelerator nothing is kept: its
    allocator has no page faults, and caches freed memory by stream.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Tensor] = {}

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer, uint8 `[num_bytes]`; the caller owns it until `free`.

        Args:
            name: purpose of the buffer within a sum.
            num_bytes: size of the buffer.
            device: device of the buffer.

        Returns:
            Zeros; or the buffer of this name and size that was freed last, with its values.
        """
        kept = self._kept.pop((name, num_bytes), None)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device) if kept is None else kept

    def free(self, **buffers: Tensor) -> None:
        """Keep buffers for the next sum: by name, uint8, used by no collective under way."""
        for name, buffer in buffers.items():
            if not runs_ahead(buffer.device):
                self._kept[name, buffer.numel()] = buffer
