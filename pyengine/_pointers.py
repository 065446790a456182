"""Check tensors once, at the edge, and hold their addresses for the native core."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pyengine import _native

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = tuple(DTYPE_CODES)
# Subclasses may keep their data elsewhere, so only these are read by the core itself.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

TensorList = Sequence[torch.Tensor | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A long list's addresses in device memory, written in the order of one stream."""

    memory: torch.Tensor
    stream: torch.cuda.Stream
    written: torch.cuda.Event

    def wait(self) -> None:
        """Let the current stream read the addresses."""
        current = torch.cuda.current_stream(self.memory.device)
        # A capture may not wait for what is outside of it, and need not: torch waits for the device when it begins.
        if current != self.stream and not torch.cuda.is_current_stream_capturing():
            current.wait_event(self.written)
            self.memory.record_stream(current)


@dataclasses.dataclass(frozen=True, slots=True)
class Pointers:
    """The checked tensors of one plan's slots; make it with `BucketPlan.pointers`.

    Keeps the tensors alive. Stale once a tensor's storage is replaced (`.data =`, `resize_`, `.to_`): make it anew.
    """

    tensors: TensorList
    numels: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None  # None: no slot has a tensor
    table: Any  # _core.Table for CPU and CUDA tensors, None without the core or elsewhere
    upload: Upload | None = None  # keeps the device memory that `table` points to


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    layout = "" if tensor.layout != torch.strided else f" stride {tuple(tensor.stride())}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout} on {tensor.device}"


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {_describe(tensor)}; needed a torch.Tensor")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {_describe(tensor)}; needed a dense contiguous tensor: "
            "pass tensor.contiguous(), or to_dense() if it is sparse"
        )


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device
) -> None:
    """Check one 1-D tensor of an op: dtype, at least `numel` elements, contiguous, on `device`."""
    _check_dense(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {_describe(tensor)}; needed dtype {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or tensor.numel() < numel:
        raise ValueError(f"{name} is {_describe(tensor)}; needed one dimension of at least {numel} elements")
    if tensor.device != device:
        raise ValueError(f"{name} is {_describe(tensor)}; needed {device}, where the other tensors are")


def check_flat(name: str, tensor: torch.Tensor, numel: int, device: torch.device) -> None:
    """Check a flat buffer of any of the three dtypes."""
    check_tensor(name, tensor, _DTYPES, numel, device)


def check_per_slot(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, device: torch.device
) -> None:
    """Check a result vector with exactly one element a slot."""
    check_tensor(name, tensor, (dtype,), numel, device)
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; needed {numel}, one a slot")


def check_scale(name: str, scale: torch.Tensor, device: torch.device) -> None:
    """Check a device scalar."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is {_describe(scale)}; needed a 0-dim tensor: torch.tensor({scale!r})")
    if scale.dim() != 0 or scale.dtype != torch.float32 or scale.device != device:
        raise ValueError(f"{name} is {_describe(scale)}; needed a 0-dim torch.float32 on {device}")


def _check_slots(
    name: str, tensors: TensorList, numels: tuple[int, ...]
) -> tuple[torch.dtype, torch.device | None]:
    """Check slot by slot, to say which one is wrong; the core's gather has no words."""
    if len(tensors) != len(numels):
        raise ValueError(f"{name} has {len(tensors)} tensors; needed {len(numels)}, one (or None) a slot")
    first = None
    for index, (tensor, numel) in enumerate(zip(tensors, numels, strict=True)):
        if tensor is None:
            continue
        entry = f"{name}[{index}]"
        _check_dense(entry, tensor)
        if tensor.dtype not in DTYPE_CODES:
            raise TypeError(f"{entry} is {_describe(tensor)}; needed dtype {' or '.join(map(str, _DTYPES))}")
        if tensor.numel() != numel:
            raise ValueError(f"{entry} has {tensor.numel()} elements; needed {numel}, the numel of its slot")
        first = tensor if first is None else first
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{entry} is {tensor.dtype} on {tensor.device}; needed {first.dtype} on {first.device} like the "
                "tensors before it: make one plan for each dtype and device"
            )
    return (torch.float32, None) if first is None else (first.dtype, first.device)


def _device(kind: int, index: int) -> torch.device | None:
    """Translate the core's c10::DeviceType; below zero no slot has a tensor."""
    return None if kind < 0 else torch.device("cuda", index) if kind == 1 else torch.device("cpu")


def gather(
    name: str,
    tensors: TensorList | Pointers,
    numels: tuple[int, ...],
    native_plan: _native._core.BucketPlan | None,
) -> Pointers:
    """Check `tensors` against the slots and collect their addresses; a `Pointers` passes through."""
    if isinstance(tensors, Pointers):
        if tensors.numels is not numels and tensors.numels != numels:
            raise ValueError(f"{name} is a Pointers of another plan; make it with this plan's pointers()")
        return tensors
    if not isinstance(tensors, list):
        tensors = list(tensors)
    if native_plan is None:
        return Pointers(tensors, numels, *_check_slots(name, tensors, numels), None)
    core = _native.core()
    assert core is not None  # it made the plan
    if _native.can_gather():
        table = core.gather(native_plan, tensors, _PLAIN)
        if table is not None:
            # A slow check would find the same: gather only accepts one dtype, and one device of these.
            return Pointers(tensors, numels, _DTYPES[table.dtype], _device(*table.device), table)
    dtype, device = _check_slots(name, tensors, numels)
    table = None
    if device is None or device.type in ("cpu", "cuda"):
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        table = core.Table(addresses, DTYPE_CODES[dtype])
    return Pointers(tensors, numels, dtype, device, table)
