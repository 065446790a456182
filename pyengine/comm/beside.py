"""A stream beside the backward, for what must wait for other ranks before it may travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Beside:
    """Work that runs after everything its current stream has been given so far, without holding that stream up.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._device = device

    @contextmanager
    def run(self, lent: Sequence[Tensor]) -> Iterator[None]:
        """Let the body work on the other stream.

        Args:
            lent: tensors of the current stream that the body uses and that may be freed before it has run.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for tensor in lent:
            for dense in (
                [tensor] if tensor.layout is torch.strided else [tensor._indices(), tensor._values()]
            ):
                dense.record_stream(self._stream)
        with self._stream:
            yield
