"""A stream for work that waits for other ranks, so that the backward does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """Runs work after everything on the current stream so far, without stalling that stream.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: its kernels fill the buckets that collectives wait for, and must not queue behind
        # the kernels of the backward.
        self._stream = torch.Stream(device, priority=-1)
        self._device = device

    @contextmanager
    def run(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run the body on the side stream.

        Args:
            tensors: as for `Comm.side_stream`.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for tensor in tensors:
            for dense in (
                [tensor] if tensor.layout is torch.strided else [tensor._indices(), tensor._values()]
            ):
                dense.record_stream(self._stream)
        with self._stream:
            yield
