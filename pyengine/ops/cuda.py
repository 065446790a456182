"""Run a plan's ops on CUDA: to the core's kernels add the current stream and the device memory that they
need.

Nothing here waits for the device but a plan's first op there, which copies the plan to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pyengine.ops import native
from pyengine.ops.pointers import Pointers, Upload


def _on_current_stream(op: str) -> Callable[..., None]:
    """Return the method of `CudaPlan` that launches an op of the core's plan."""

    def method(self: CudaPlan, *arguments: Any) -> None:
        self._launch(getattr(self._plan, op), *arguments)

    return method


class CudaPlan:
    """A native plan on one device, with the methods of `core.BucketPlan`; calls run on the current stream.

    Owns device memory: the plan's offsets and chunks, and for each stream the scratch of norms. Addresses
    given to an op are of memory on that device, which its caller owns and keeps until the op has run.

    Args:
        plan: the core's, of which the layout is copied.
        device: a CUDA device with its index.

    Cost: one launch an op. 16 bytes a slot and 24 a chunk (up to 16384 elements of a slot), copied once; and
        4 a slot and 16 a chunk for each stream that takes norms.

    Raises:
        RuntimeError: when made during a CUDA graph capture: the plan must be on the device before.
    """

    def __init__(self, plan: native._core.BucketPlan, device: torch.device) -> None:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the plan's first op on {device} came during a CUDA graph capture, which cannot hold "
                    "the copy of the plan to the device; run one op of this plan there once before the "
                    "capture"
                )
        words = torch.empty(plan.num_words, dtype=torch.int64)
        plan.write_words(words.data_ptr())
        self._device = device
        self._words = words.to(device)  # waits until it is there: any stream may read it from now on
        self._plan = native._core.CudaPlan(plan, self._words.data_ptr())
        self._streams: set[int] = set()
        self._scratch: dict[int, Tensor] = {}

    pack_ = _on_current_stream("pack_")
    unpack_ = _on_current_stream("unpack_")
    accumulate_ = _on_current_stream("accumulate_")
    accumulate_cast_ = _on_current_stream("accumulate_cast_")
    exact_deposit_ = _on_current_stream("exact_deposit_")
    exact_align_ = _on_current_stream("exact_align_")
    exact_round_ = _on_current_stream("exact_round_")

    def unscale_norm(self, *arguments: Any) -> None:
        self._launch(self._unscale_norm, *arguments)

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


class Functions:
    """The core's functions that need no plan, on one device; calls run on its current stream.

    Args:
        core: the native module.
        device: a CUDA device with its index; addresses given to a function are there.

    Cost: one launch a call.
    """

    def __init__(self, core: ModuleType, device: torch.device) -> None:
        self._core, self._device = core, device

    def codec_encode(self, *arguments: Any) -> None:
        self._launch(self._core.codec_encode_cuda, *arguments)

    def codec_sum_encode(self, *arguments: Any) -> None:
        self._launch(self._core.codec_sum_encode_cuda, *arguments)

    def codec_sum(self, *arguments: Any) -> None:
        self._launch(self._core.codec_sum_cuda, *arguments)

    def _launch(self, function: Callable[..., None], *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            function(torch.cuda.current_stream(self._device).cuda_stream, *arguments)


def uploaded(pointers: Pointers, device: torch.device) -> Pointers:
    """Return the pointers with their addresses where kernels on `device` find them.

    Args:
        pointers: as `gather` returns them, or made before by this function.
        device: where the ops will run.

    Cost: nothing for up to `core.INLINE_SLOTS` (256) addresses, which travel in a kernel's parameters. More
        are written to int64 [n] on the device, which the result owns, in one more launch.
    """
    if pointers.upload is not None:
        pointers.upload.wait()
        return pointers
    if device.type != "cuda" or pointers.table is None:
        return pointers
    core = native.cuda_core()
    if core is None or len(pointers.numels) <= core.INLINE_SLOTS:
        return pointers
    with torch.cuda.device(device):
        stream, written = torch.cuda.current_stream(), torch.cuda.Event()
        captured = torch.cuda.is_current_stream_capturing()
        memory = torch.empty(len(pointers.numels), dtype=torch.int64, device=device)
        table = core.uploaded(pointers.table, memory.data_ptr(), stream.cuda_stream)
        written.record(stream)
    return dataclasses.replace(pointers, table=table, upload=Upload(memory, stream, written, captured))
