"""Argument checks of the public ops, and collection of tensor addresses for the native core."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from pyengine.ops import native

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = tuple(DTYPE_CODES)
# Device types on which `data_ptr()` is the address of a tensor's elements.
ADDRESSED = ("cpu", "cuda")
MAX_NUMEL = 2**40

TensorList = Sequence[torch.Tensor | None]
# The value of `__torch_dispatch__` in classes that do not override it.
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """The addresses of a long list of tensors, copied to device memory on one stream."""

    memory: torch.Tensor  # int64 [n], owned; `record_stream` is called for each stream that waits.
    stream: torch.cuda.Stream | None  # Stream of the write; None if the list is for a single call.
    written: torch.cuda.Event | None  # Recorded after the write; None if the list is for a single call.
    captured: bool = False  # Whether the addresses are written only by the replay of a CUDA graph.

    def wait(self) -> None:
        with torch.cuda.device(self.memory.device):
            current, captures = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        if self.captured and not captures:
            raise RuntimeError(
                f"Pointers of {self.memory.numel()} tensors were created during a CUDA graph capture, so "
                "their addresses are written only when the graph is replayed; create them before the "
                "capture, or create new ones for use outside of the graph"
            )
        # A graph capture cannot wait for work outside the capture. It does not need to, because torch
        # synchronizes the device before a capture begins.
        if current != self.stream and not captures:
            assert self.written is not None
            current.wait_event(self.written)
            self.memory.record_stream(current)


@dataclasses.dataclass(frozen=True, slots=True)
class Pointers:
    """The checked tensors for the slots of one plan, created by `BucketPlan.pointers`.

    A `Pointers` keeps the tensors alive, but the caller owns their memory. After a tensor gets new memory
    (`.data =`, `share_memory_()`), every op checks the list and reads the addresses again; create a new
    `Pointers` to avoid these checks.
    """

    tensors: TensorList  # [n], any shapes.
    numels: tuple[int, ...]  # [n].
    dtype: torch.dtype  # Dtype of all tensors; float32 if no slot has a tensor.
    device: torch.device | None  # Device of all tensors; None if no slot has a tensor.
    table: Any  # _core.Table for CPU and CUDA tensors; None without the core or on other devices.
    upload: Upload | None = None  # Keeps alive the device memory to which `table` points.


def check_layout(offsets: tuple[int, ...], numels: tuple[int, ...]) -> int:
    """Check the slots of a plan; return the number of elements that a flat buffer needs."""
    if len(offsets) != len(numels):
        raise ValueError(
            f"offsets has {len(offsets)} entries and numels {len(numels)}; expected one offset and one numel "
            "per slot"
        )
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        if offset < 0 or numel < 0:
            raise ValueError(
                f"slot {index} has offset {offset} and numel {numel}; expected both to be at least 0"
            )
        if not numel and offset > MAX_NUMEL:
            raise ValueError(f"slot {index} begins at element {offset}; expected at most 2**40")
    filled = sorted(
        (offset, numel, index)
        for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True))
        if numel
    )
    for (offset, numel, index), (next_offset, _, next_index) in itertools.pairwise(filled):
        if offset + numel > next_offset:
            raise ValueError(
                f"slots {index} and {next_index} overlap: slot {index} ends at {offset + numel}, "
                f"slot {next_index} begins at {next_offset}"
            )
    end = filled[-1][0] + filled[-1][1] if filled else 0
    if end > MAX_NUMEL:
        raise ValueError(
            f"slot {filled[-1][2]} ends at element {end}; expected at most 2**40, which is 4 TiB of float32"
        )
    return end


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    layout = "" if tensor.layout != torch.strided else f" stride {tuple(tensor.stride())}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout} on {tensor.device}"


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's elements are stored contiguously, starting at its address."""
    if native.can_gather() and native._core.is_plain(tensor):
        return  # the core has done all checks below, in a fifth of the time
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {_describe(tensor)}; expected a torch.Tensor")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {_describe(tensor)}; expected a dense contiguous tensor: "
            "pass tensor.contiguous(), or to_dense() if it is sparse"
        )
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        raise ValueError(
            f"{name} is {_describe(tensor)}, a lazily negated, conjugated or all-zero view; expected a "
            "tensor whose values are stored in memory: pass tensor.resolve_neg().resolve_conj().clone()"
        )
    if tensor.device.type not in ADDRESSED or tensor.numel() == 0:
        return
    if keeps_elements_elsewhere(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which does not store its elements at its address; "
            "expected a plain tensor, for example `.to_local()` of a DTensor"
        )
    held = tensor.untyped_storage().nbytes()
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if held < needed:
        raise ValueError(
            f"{name} is {_describe(tensor)}, whose storage holds {held} bytes; expected at least {needed}: "
            "the storage was resized (FSDP frees parameters and gradients this way), so call the op while "
            "the tensor has its memory"
        )
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(
            f"{name} is {_describe(tensor)}, whose address is not aligned to its elements (torch.frombuffer "
            "with an odd offset creates such tensors); expected an address that is a multiple of "
            f"{tensor.element_size()} bytes: pass tensor.clone()"
        )


def keeps_elements_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor may store elements elsewhere than at the tensor's address."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def device_of(name: str, tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor that has not been checked yet."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {_describe(tensor)}; expected a torch.Tensor")
    return tensor.device


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device
) -> None:
    """Check that a 1-D tensor is contiguous, on `device`, large enough, and has one of `dtypes`."""
    check_dense(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {_describe(tensor)}; expected dtype {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or tensor.numel() < numel:
        raise ValueError(
            f"{name} is {_describe(tensor)}; expected one dimension with at least {numel} elements"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is {_describe(tensor)}; expected {device}, like the other tensors")


def check_flat(name: str, tensor: torch.Tensor, numel: int, device: torch.device) -> None:
    """Check a flat buffer on `device`: contiguous, large enough, and float32, bfloat16 or float16."""
    check_tensor(name, tensor, _DTYPES, numel, device)


def check_each(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    numel: int,
    device: torch.device,
    of: str = "slot",
) -> None:
    """Check that a contiguous 1-D tensor on `device` has exactly `numel` elements.

    `of` says in the error message what has one element each, for example "slot".
    """
    check_tensor(name, tensor, (dtype,), numel, device)
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {numel}, one per {of}")


def check_rows(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, device: torch.device
) -> torch.Tensor:
    """Check that a matrix `[rows, numel]` on `device` has at least one row and that its rows are contiguous.

    Returns a 1-D view of the memory from the first to the last element.
    """
    span = tensor
    is_matrix = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dim() == 2
    if is_matrix and not tensor.is_contiguous() and tensor.stride(1) == 1:  # rows may have gaps between them
        length = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
        span = tensor.as_strided((length,), (1,))
    check_dense(name, span)
    if tensor.dtype != dtype or tensor.device != device:
        raise TypeError(
            f"{name} is {_describe(tensor)}; expected {dtype} on {device}, where the other tensors are"
        )
    if tensor.dim() != 2 or tensor.shape[0] < 1 or tensor.shape[1] != numel:
        raise ValueError(f"{name} is {_describe(tensor)}; expected [W, {numel}], with W at least 1")
    return span


def check_aligned(name: str, tensor: torch.Tensor, num_bytes: int) -> None:
    """Check that a tensor begins at a multiple of `num_bytes`, in memory and in its storage.

    torch cannot view a misaligned tensor as another dtype.
    """
    if tensor.device.type not in ADDRESSED or tensor.numel() == 0:
        return
    for begin in (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()):
        if begin % num_bytes:
            raise ValueError(
                f"{name} begins {begin % num_bytes} bytes after a multiple of {num_bytes}; expected a "
                "multiple: choose an aligned offset in the buffer, or pass a clone()"
            )


def check_scale(name: str, scale: torch.Tensor, device: torch.device) -> None:
    if not isinstance(scale, torch.Tensor):
        raise TypeError(
            f"{name} is {_describe(scale)}; expected a 0-dim tensor: pass torch.tensor({scale!r})"
        )
    check_dense(name, scale)
    if scale.dim() != 0 or scale.dtype != torch.float32 or scale.device != device:
        raise ValueError(f"{name} is {_describe(scale)}; expected a 0-dim torch.float32 tensor on {device}")


def check_scalars(
    device: torch.device, scale: torch.Tensor, only_if: torch.Tensor | None
) -> list[tuple[str, torch.Tensor]]:
    """Check the scale and the condition of an op; return both with their names."""
    scalars = [("scale", scale)] if only_if is None else [("scale", scale), ("only_if", only_if)]
    for name, scalar in scalars:
        check_scale(name, scalar, device)
    return scalars


def _check_slots(
    name: str, tensors: TensorList, numels: tuple[int, ...]
) -> tuple[torch.dtype, torch.device | None]:
    """Check the tensors slot by slot; raise an error that names the first invalid tensor."""
    if len(tensors) != len(numels):
        raise ValueError(f"{name} has {len(tensors)} tensors; expected {len(numels)}, one (or None) per slot")
    first = None
    for index, (tensor, numel) in enumerate(zip(tensors, numels, strict=True)):
        if tensor is None:
            continue
        entry = f"{name}[{index}]"
        check_dense(entry, tensor)
        if tensor.dtype not in DTYPE_CODES:
            raise TypeError(
                f"{entry} is {_describe(tensor)}; expected dtype {' or '.join(map(str, _DTYPES))}"
            )
        if tensor.numel() != numel:
            raise ValueError(
                f"{entry} has {tensor.numel()} elements; expected {numel}, the numel of its slot"
            )
        first = tensor if first is None else first
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{entry} is {tensor.dtype} on {tensor.device}; expected {first.dtype} on {first.device}, "
                "like the tensors before it: use one plan per dtype and device"
            )
    return (torch.float32, None) if first is None else (first.dtype, first.device)


def gather(
    name: str,
    tensors: TensorList | Pointers,
    numels: tuple[int, ...],
    native_plan: native._core.BucketPlan | None,
) -> Pointers:
    """Check `tensors` against the slots and collect their addresses.

    Args:
        name: name of the list in error messages.
        tensors: one entry per slot, which is None or a contiguous float32, bfloat16 or float16 tensor of any
            shape. All tensors have the same dtype and device. A `Pointers` is returned unchanged unless the
            memory of a tensor has moved.
        numels: int [n], number of elements of each slot.
        native_plan: the core's plan of these slots; None without the core.

    Cost: about 30 ns per plain tensor on the host, and no device work.
    """
    if isinstance(tensors, Pointers):
        if tensors.numels is not numels and tensors.numels != numels:
            raise ValueError(f"{name} is a Pointers of another plan; create it with this plan's pointers()")
        table = tensors.table if native.can_gather() else None
        if native_plan and table and native_plan.first_moved(table, tensors.tensors) < 0:
            return tensors  # every tensor still has its recorded memory and numel
        tensors = tensors.tensors
    if not isinstance(tensors, list):
        tensors = list(tensors)
    if native_plan is not None and native.can_gather():
        table = native._core.gather(native_plan, tensors)
        if table is not None:
            # The checks below would pass, because the core accepts only one dtype and one CPU or CUDA device.
            kind, index = table.device  # `kind` is a c10::DeviceType; negative if there is no tensor.
            found = torch.device("cuda", index) if kind == 1 else torch.device("cpu")
            return Pointers(tensors, numels, _DTYPES[table.dtype], None if kind < 0 else found, table)
    dtype, device = _check_slots(name, tensors, numels)
    table = None
    if native_plan is not None and (device is None or device.type in ADDRESSED):
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        table = native._core.Table(addresses, DTYPE_CODES[dtype])
    return Pointers(tensors, numels, dtype, device, table)
