"""The device work of a window as a CUDA graph, with the values that the host writes and reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor

from pyengine.ops.capture import Section
from pyengine.ops.device import is_on_default_stream
from pyengine.window.digest import Use
from pyengine.window.header import Header, LocalWindow
from pyengine.window.verdict import Outcome, WindowReport


class CaptureStream:
    """The stream for captures: the caller's stream, or a new stream instead of the default stream.

    The default stream cannot be captured. The windows before a capture also run on the capture stream,
    because autograd keeps accumulating gradients on the same stream.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """Run the body on the capture stream; both streams wait for each other's work in program order."""
        if device.type != "cuda":  # only CUDA has graphs
            yield
            return
        around = torch.cuda.current_stream(device)
        if self.stream is None:
            self.stream = torch.cuda.Stream(device) if is_on_default_stream(device) else around
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            yield
        around.wait_stream(self.stream)


class DeviceGraph:
    """Work on a CUDA device, recorded once and replayed any number of times."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self, on: CaptureStream) -> Iterator[None]:
        """Record the work that the body launches on the stream, without running it."""
        # Use "thread_local", because another thread, such as NCCL's watchdog, may query events.
        with torch.cuda.graph(self._graph, stream=on.stream, capture_error_mode="thread_local"):
            yield

    def replay(self) -> None:
        self._graph.replay()

    @staticmethod
    def problems(device: torch.device) -> list[str]:
        """Return the reasons why work on a device cannot be captured."""
        if device.type == "cuda":
            return []
        return [f"the parameters are on {device}: a graph needs a CUDA device"]


@dataclass
class WindowGraph:
    """The device work of a window, from its first forward to its optimizer steps.

    The tensors are in the graph's memory, and keep the values of the last run until the next run.
    """

    work: DeviceGraph
    section: Section
    inputs: Sequence[Tensor]  # Static copies of the tensors of the window's micro-batches.
    # The factors by which the previous window's gradients were multiplied. Ranks compare these factors in the
    # header. The factors are not in the graph's memory, which may be overwritten before the header reads
    # them.
    factors: list[Tensor]
    # ---- properties that must not change ----
    # Tensors that the optimizers' steps read or write (parameters, state, hyperparameters); the address of
    # each parameter, and whether it requires a gradient; the layout of the engine's sums.
    memory: tuple[Sequence[Tensor], Sequence[tuple[int, bool]], object] = field(init=False)
    # ---- values of the captured window ----
    header: Header = field(init=False)
    outcome: Outcome = field(init=False)
    report: WindowReport = field(init=False)
    counts: LocalWindow = field(init=False)
    final: dict[str, Any] = field(init=False)
    grads: Sequence[Tensor | None] = field(init=False)
    stepped: Sequence[Any] = field(init=False)
    collectives: int = 0
    bytes_sent: int = 0

    def copy_factors(self, use: Use) -> None:
        """Copy the previous window's factors to the tensors from which the graph's header reads them."""
        for mine, factor in zip(self.factors, use.factors, strict=True):
            if mine is not factor:
                mine.copy_(factor)

    def take(self, inputs: Sequence[Tensor]) -> None:
        """Copy the tensors of a window to the inputs of the graph."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)

    def fits(self, memory: tuple[Sequence[Tensor], Sequence[tuple[int, bool]], object]) -> bool:
        """Whether the parameters and optimizers still use the same memory as the graph."""
        (tensors, addresses, layout), (tensors_now, addresses_now, layout_now) = self.memory, memory
        are_same = len(tensors) == len(tensors_now) and all(map(is_, tensors, tensors_now))
        return are_same and addresses == addresses_now and layout is layout_now
