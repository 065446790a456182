"""Sections of device work that are first recorded (rehearsed), and then captured as a CUDA graph.

A graph repeats only the device work of the section, so the host must neither read values in the section nor
send values that change between runs. All values of the engine go through `ops.device.send` and `Readback`,
which call `section()`. A rehearsal also stores the sent values on the device. The capture uses the stored
values. A value that is read back stays on the device until the graph has run.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyengine.ops.trace import find_caller

# Operations that make the host wait for a result or its shape.
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "bincount"}
_READS |= {"unique_consecutive", "unique_dim"}

# Index dtypes that act as masks. The shape of the result depends on the number of nonzero elements in a mask.
_MASKS = {torch.bool, torch.uint8}


class CaptureError(RuntimeError):
    """Raised if a section cannot be captured; the message names the operation, its line and the remedy."""


class Section:
    """A section of device work, which is rehearsed unless `is_capture` is set.

    Attributes:
        is_own_copy: whether the engine itself is copying between host and device. Such copies are not
            reported.
        problems: operations that cannot be captured, added by `report`.
        inputs: tensors that the host fills before every run, one per `send(..., refills=True)`.
        readbacks: the readbacks created in the capture, in order; each is started after the graph has run.
    """

    def __init__(self) -> None:
        self.is_capture = False
        self.is_own_copy = False
        self.problems: list[str] = []
        self.inputs: list[Tensor] = []
        self.readbacks: list[Any] = []
        self._num_taken = 0
        self._constants: dict[object, Tensor] = {}

    def rehearse(self, values: Sequence[float], made: Tensor, *, refills: bool) -> None:
        """Keep a device copy of the values that the host has sent, or memory for values that it refills."""
        if refills:
            self.inputs.append(torch.empty_like(made))
        else:
            self._constants[_key(values, made.dtype, made.device)] = made.clone()

    def find(
        self, values: Sequence[float], dtype: torch.dtype, device: torch.device, *, refills: bool
    ) -> Tensor:
        """Return a device tensor that has these values when the graph runs, without copying from the host."""
        if refills:
            self._num_taken += 1
            if self._num_taken <= len(self.inputs):
                return self.inputs[self._num_taken - 1]
        elif (constant := self._constants.get(_key(values, dtype, device))) is not None:
            return constant.clone()
        raise CaptureError(
            f"the engine sends {len(values)} values of {dtype} that it did not send in earlier windows: all "
            "windows of the same length must run the same code"
        )

    def rewind(self) -> None:
        """Discard the inputs of an earlier rehearsal."""
        self.inputs, self.readbacks, self._num_taken = [], [], 0


def _key(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> object:
    return tuple(values), dtype, device


# The section that is currently running, if any. The list is not thread-local, because autograd launches
# device work on its own threads.
_entered: list[Section] = []


def section() -> Section | None:
    """Return the section that is being rehearsed or captured, or None."""
    return _entered[0] if _entered else None


def is_capturing() -> bool:
    """Whether device work is being captured instead of run, so that events and values cannot be read."""
    return bool(_entered) and _entered[0].is_capture


def report(problem: str) -> None:
    """In a rehearsal, record a problem; in a capture, raise `CaptureError`."""
    if is_capturing():
        raise CaptureError(problem)
    if _entered:
        _entered[0].problems.append(problem)


@contextlib.contextmanager
def running(entered: Section, *, is_capture: bool) -> Iterator[None]:
    """Run the body as a section of device work, which is rehearsed or captured."""
    if _entered:
        raise CaptureError("another section is already being captured: capture one window at a time")
    entered.is_capture = is_capture
    _entered.append(entered)
    try:
        yield
    finally:
        _entered.clear()


@contextlib.contextmanager
def own_copy() -> Iterator[None]:
    """Mark the copies that the body makes between host and device as the engine's own."""
    for entered in _entered:
        entered.is_own_copy = True
    try:
        yield
    finally:
        for entered in _entered:
            entered.is_own_copy = False


class Rehearsal(TorchDispatchMode):
    """A dispatch mode that records the operations of a section, and reports those that a graph cannot repeat.

    The reported operations are those that make the host wait, and those that copy between host and device.
    Each report contains the source line.

    Args:
        is_on_device: function that returns whether a tensor is on the device whose work is captured.

    Attributes:
        operations: for each operation, its name, its arguments (tensors as shapes) and its source line.
    """

    def __init__(self, is_on_device: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_on_device = is_on_device
        self.operations: list[tuple[str, tuple[Any, ...], str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise torch would no longer compile functions, even after the rehearsal."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        result = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_made = not _copies_itself() and isinstance(result, Tensor) and self._is_on_device(result)
        if is_made or any(map(self._is_on_device, tensors)):
            self._look(name, leaves, result)
        return result

    def _look(self, name: str, leaves: list[Any], result: Any) -> None:
        line = _line_of_caller()
        given = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves)
        self.operations.append((name, given, line))
        if _copies_itself():
            return
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        indices = {"index": tensors[1:], "index_put_": tensors[1:-1]}.get(name, [])
        if name in _READS or any(index.dtype in _MASKS for index in indices):
            report(f"{line}: {name} makes the host wait for a value on the device")
        elif name in ("_to_copy", "copy_") and not all(map(self._is_on_device, [*tensors, result])):
            ends = "to the device" if self._is_on_device(result) else "to the host"
            report(f"{line}: {name} copies {ends}")


def _copies_itself() -> bool:
    return bool(_entered) and _entered[0].is_own_copy


def _plain(leaf: Any) -> Any:
    """Return a number unchanged, and nan and other values as text, so that nan equals nan."""
    if isinstance(leaf, int | float) and not math.isnan(leaf):
        return leaf
    is_value = isinstance(leaf, float | str | torch.dtype | torch.device | torch.layout | torch.memory_format)
    return repr(leaf) if is_value else type(leaf).__name__


def difference(one: Rehearsal, other: Rehearsal) -> str:
    """Describe the first difference between two rehearsals; return an empty string if they are equal."""
    for first, second in zip(one.operations, other.operations, strict=False):
        if first[:2] == second[:2]:
            continue
        if first[0] != second[0]:
            return f"{second[2]}: {second[0]} where the previous window ran {first[0]} ({first[2]})"
        changed = [(a, b) for a, b in zip(first[1], second[1], strict=False) if a != b]
        was, now = changed[0] if changed else (first[1], second[1])
        what = "a shape" if isinstance(now, tuple) else "a host value"
        return f"{second[2]}: {what} in {second[0]} is {now}, but was {was} in the previous window"
    longer = max(one.operations, other.operations, key=len)
    short = min(len(one.operations), len(other.operations))
    if len(longer) == short:
        return ""
    name, _, line = longer[short]
    return f"{line}: {name} ran in only one of two windows of the same length"


def _line_of_caller() -> str:
    """Return the file and line of the user's frame, or of the innermost frame in this package."""
    frame, ours = find_caller(sys._getframe(1))  # noqa: SLF001 - `inspect` would read source files
    if frame is None:
        frame = next((each for each in ours if each.f_code.co_filename != __file__), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
