"""Run a plan's ops on CUDA: to the core's kernels add the current stream and the device memory that they need.

Nothing here waits for the device but a plan's first op there, which copies the plan to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyengine import _native
from pyengine._pointers import Pointers, Upload


class CudaPlan:
    """A native plan on one device, with the methods of `core.BucketPlan`; calls run on the current stream.

    Raises:
        RuntimeError: when made during a CUDA graph capture: the plan must be on the device before.
    """

    def __init__(self, plan: _native._core.BucketPlan, device: torch.device) -> None:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the plan's first op on {device} came during a CUDA graph capture, which cannot hold the copy of "
                    "the plan to the device; run one op of this plan there once before the capture"
                )
        words = torch.empty(plan.num_words, dtype=torch.int64)
        plan.write_words(words.data_ptr())
        self._device = device
        self._words = words.to(device)  # waits until it is there: any stream may read it from now on
        core = _native.core()
        assert core is not None  # it made the plan
        self._plan: _native._core.CudaPlan = core.CudaPlan(plan, self._words.data_ptr())
        self._streams: set[int] = set()
        self._scratch: dict[int, Tensor] = {}

    def pack_(self, *arguments: Any) -> None:
        self._launch(self._plan.pack_, *arguments)

    def unpack_(self, *arguments: Any) -> None:
        self._launch(self._plan.unpack_, *arguments)

    def accumulate_(self, *arguments: Any) -> None:
        self._launch(self._plan.accumulate_, *arguments)

    def accumulate_cast_(self, *arguments: Any) -> None:
        self._launch(self._plan.accumulate_cast_, *arguments)

    def unscale_norm(self, *arguments: Any) -> None:
        self._launch(self._unscale_norm, *arguments)

    def exact_deposit_(self, *arguments: Any) -> None:
        self._launch(self._plan.exact_deposit_, *arguments)

    def exact_align_(self, *arguments: Any) -> None:
        self._launch(self._plan.exact_align_, *arguments)

    def exact_round_(self, *arguments: Any) -> None:
        self._launch(self._plan.exact_round_, *arguments)

    def _unscale_norm(self, stream: int, *arguments: Any) -> None:
        scratch = self._get_scratch(stream)
        self._plan.unscale_norm(stream, scratch.data_ptr(), *arguments)

    def _launch(self, op: Callable[..., None], *arguments: Any) -> None:
        if torch.cuda.current_device() == self._device.index:
            return op(self._current_stream(), *arguments)
        with torch.cuda.device(self._device):
            op(self._current_stream(), *arguments)

    def _current_stream(self) -> int:
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            self._words.record_stream(stream)  # so that its memory outlives the plan where kernels still run
            self._streams.add(stream.cuda_stream)
        return stream.cuda_stream

    def _get_scratch(self, stream: int) -> Tensor:
        """Return memory that no other call uses at the same time; the kernel leaves its tickets at zero."""
        if torch.cuda.is_current_stream_capturing():
            # It belongs to the graph, whose replays may run beside this stream's own calls.
            return self._make_scratch()
        if stream not in self._scratch:
            self._scratch[stream] = self._make_scratch()
        return self._scratch[stream]

    def _make_scratch(self) -> Tensor:
        return torch.zeros(self._plan.scratch_bytes, dtype=torch.uint8, device=self._device)


def place(pointers: Pointers, device: torch.device) -> Pointers:
    """Return the pointers with their addresses where kernels on `device` find them.

    Up to `core.INLINE_SLOTS` travel in a kernel's parameters; more are uploaded, which is one more launch.
    """
    if pointers.upload is not None:
        pointers.upload.wait()
        return pointers
    if device.type != "cuda" or pointers.table is None:
        return pointers
    core = _native.cuda_core()
    if core is None or len(pointers.numels) <= core.INLINE_SLOTS:
        return pointers
    with torch.cuda.device(device):
        stream, written = torch.cuda.current_stream(), torch.cuda.Event()
        memory = torch.empty(len(pointers.numels), dtype=torch.int64, device=device)
        table = core.uploaded(pointers.table, memory.data_ptr(), stream.cuda_stream)
        written.record(stream)
    return dataclasses.replace(pointers, table=table, upload=Upload(memory, stream, written))
