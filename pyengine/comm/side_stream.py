"""A stream that the backward does not wait for, for what must wait for other ranks before it may travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """Work that runs after everything its current stream has been given so far, without holding that stream
    up.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        # What it packs must not queue behind the backward's own kernels: the collective waits for it.
        self._stream = torch.Stream(device, priority=-1)
        self._device = device

    @contextmanager
    def run(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the body work on the side stream.

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
