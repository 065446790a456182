"""The ops of a plan on CUDA, which use the current stream and allocate the device memory that they need.

Only the first op of a plan on a device waits for the device, because it copies the plan to the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pyengine.ops import native
from pyengine.ops.device import HOST
from pyengine.ops.pointers import Pointers, Upload

_NOTHING = nullcontext()


def _on_current_stream(op: str) -> Callable[..., None]:
    """Return a method of `CudaPlan` that launches an op of the native plan."""

    def method(self: CudaPlan, *arguments: Any) -> None:
        self._launch(getattr(self._plan, op), *arguments)

    return method


class CudaPlan:
    """A native plan on one device, with the methods of `core.BucketPlan`.

    Calls run on the current stream. The plan owns device memory for its offsets and chunks, and scratch
    memory for norms on each stream. Addresses passed to an op point to memory on the same device; the caller
    owns this memory, and keeps it alive until the op has run.

    Args:
        plan: the native plan; its layout is copied.
        device: a CUDA device with an index.

    Cost: one launch per op. A plan needs 32 bytes of device memory per chunk (a chunk is up to 16384 elements
    of a slot); they are copied to the device once. Each stream that computes norms needs 4 bytes per slot and
    16 bytes per chunk. The first plan on a device
    loads all kernels (a few megabytes), because CUDA would otherwise load each kernel at its first launch,
    possibly during a graph capture.

    Raises:
        RuntimeError: the plan was created during a CUDA graph capture, instead of before the capture.
    """

    def __init__(self, plan: native._core.BucketPlan, device: torch.device) -> None:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the plan's first op on {device} ran during a CUDA graph capture, which cannot contain "
                    "the copy of the plan to the device; run one op of this plan on that device before the "
                    "capture"
                )
            _load_kernels(device)
        words = torch.empty(plan.num_words, dtype=torch.int64, device=HOST)
        plan.write_words(words.data_ptr())
        self._device = device
        self._words = words.to(device)  # the copy blocks the host, so any stream may read it now
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
        def op(stream: int, *arguments: Any) -> None:
            scratch = self._get_scratch(stream)
            self._plan.unscale_norm(stream, scratch.data_ptr(), *arguments)

        self._launch(op, *arguments)

    def _launch(self, op: Callable[..., None], *arguments: Any) -> None:
        with _current(self._device):
            stream = _stream_of(self._device)
            if stream not in self._streams:
                # The allocator must not reuse the memory while kernels on this stream may still read it.
                self._words.record_stream(torch.cuda.current_stream(self._device))
                self._streams.add(stream)
            op(stream, *arguments)

    def _get_scratch(self, stream: int) -> Tensor:
        """Return scratch memory that no other call uses at the same time.

        The memory initially contains zeros, and the kernel resets its counters to zero.
        """
        captures = torch.cuda.is_current_stream_capturing()
        if not captures and stream in self._scratch:
            return self._scratch[stream]
        scratch = torch.zeros(self._plan.scratch_bytes, dtype=torch.uint8, device=self._device)
        if not captures:  # memory of a capture belongs to the graph, because a replay may overlap other calls
            self._scratch[stream] = scratch
        return scratch


_on_devices: WeakValueDictionary[Any, CudaPlan] = WeakValueDictionary()


def plan_on(
    device: torch.device, plan: native._core.BucketPlan, layout: tuple[tuple[int, ...], tuple[int, ...]]
) -> CudaPlan:
    """Return a plan on `device`, which must have an index; plans with equal layouts share one object."""
    found = _on_devices.get((device, layout))
    if found is None:
        found = _on_devices[device, layout] = CudaPlan(plan, device)
    return found


def run(device: torch.device, function: str, *arguments: Any) -> None:
    """Run a native function without a plan on the current stream of a CUDA device, in one launch."""
    with _current(device):
        if not torch.cuda.is_current_stream_capturing():
            _load_kernels(device)
        getattr(native._core, f"{function}_cuda")(_stream_of(device), *arguments)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current in the body; cheap if it is already the current device."""
    return _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device)


@functools.cache
def _load_kernels(device: torch.device) -> None:
    """Load all kernels once on `device`, which must be the current device."""
    native._core.load_kernels()


def _stream_of(device: torch.device) -> int:
    """Return the current cudaStream_t of a device; this is ten times faster than creating a `Stream`."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def uploaded(pointers: Pointers, device: torch.device) -> Pointers:
    """Return the pointers from `gather`, with addresses that kernels can read in many calls on a device.

    Cost: nothing for up to `core.INLINE_SLOTS` (256) addresses, which are passed as kernel parameters. A
    longer list of addresses is written to an int64 tensor on the device, with one launch per 4000 addresses.
    The result owns this tensor.
    """
    core = _core_for(pointers, device)
    if core is None or len(pointers.numels) <= core.INLINE_SLOTS:
        return pointers
    with torch.cuda.device(device):
        stream, written = torch.cuda.current_stream(), torch.cuda.Event()
        captured = torch.cuda.is_current_stream_capturing()
        memory, table = _upload(core, pointers, device)
        written.record(stream)
    return dataclasses.replace(pointers, table=table, upload=Upload(memory, stream, written, captured))


def for_one_call(pointers: Pointers, device: torch.device, *, two_lists: bool = False) -> Pointers:
    """Return the pointers for one op, with addresses that its kernel can read.

    Args:
        pointers: pointers returned by `gather` or `uploaded`.
        device: device that will run the op, on the current stream.
        two_lists: whether the op has a second list of tensors.

    Cost: nothing for up to `core.MOST_INLINE_SLOTS` (4000) addresses, or 256 in each of two lists, which are
    passed as kernel parameters. A longer list of addresses is written to an int64 tensor on the device, with
    one more launch for every 4000 addresses. The result owns this tensor. The tensor may be freed after the
    launch, because anything that reuses its memory runs later on the same stream.
    """
    if pointers.upload is not None:
        pointers.upload.wait()
        return pointers
    core = _core_for(pointers, device)
    if core is None:
        return pointers
    if len(pointers.numels) <= (core.INLINE_SLOTS if two_lists else core.MOST_INLINE_SLOTS):
        return pointers
    with _current(device):
        memory, table = _upload(core, pointers, device)
    # `dataclasses.replace` is not used, because it takes several microseconds.
    return Pointers(
        pointers.tensors, pointers.numels, pointers.dtype, pointers.device, table, Upload(memory, None, None)
    )


def _core_for(pointers: Pointers, device: torch.device) -> ModuleType | None:
    """Return the native module whose kernels read the addresses of a list, or None."""
    return native.cuda_core() if device.type == "cuda" and pointers.table is not None else None


def _upload(core: ModuleType, pointers: Pointers, device: torch.device) -> tuple[Tensor, Any]:
    """Write the addresses to memory on the current device; return the memory and its table."""
    memory = torch.empty(len(pointers.numels), dtype=torch.int64, device=device)
    return memory, core.uploaded(pointers.table, memory.data_ptr(), _stream_of(device))
