"""A section of device work that is rehearsed, and then captured as a graph that the host launches at once.

A graph repeats the device's work of the section and none of the host's, so the host may neither read a value
in it nor send one that changes. `ops.device.send` and `Readback`, through which every value of the engine
goes, ask `section()` where they are: in a rehearsal the values that are sent are remembered on the device; in
the capture they are found there, and what is read back stays on the device until the graph has run.
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

# Operations for whose result, or its shape, the host waits.
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "bincount"}
_READS |= {"unique_consecutive", "unique_dim"}

# Of an index: the result's shape is the number of elements that are set.
_MASKS = {torch.bool, torch.uint8}


class CaptureError(RuntimeError):
    """A section cannot be captured; the message names the operation, the line and the remedy."""


class Section:
    """A section of device work. It is a rehearsal until `is_capture` is set.

    Attributes:
        is_own_copy: whether the engine itself copies between host and device, which is not reported.
        problems: what cannot be captured, as `report` has found it.
        inputs: static memory that the host fills before every run, one for each `send(..., refills=True)`.
        readbacks: those that were made in the capture, in order; each is started once the graph has run.
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
        """Keep on the device what the host has sent."""
        if refills:
            self.inputs.append(torch.empty_like(made))
        else:
            self._constants[_key(values, made.dtype, made.device)] = made.clone()

    def find(
        self, values: Sequence[float], dtype: torch.dtype, device: torch.device, *, refills: bool
    ) -> Tensor:
        """Return memory on the device that has these values whenever the graph runs; do not copy to it."""
        if refills:
            self._num_taken += 1
            if self._num_taken <= len(self.inputs):
                return self.inputs[self._num_taken - 1]
        elif (constant := self._constants.get(_key(values, dtype, device))) is not None:
            return constant.clone()
        raise CaptureError(
            f"the engine sends {len(values)} values of {dtype} that it had not sent in the windows before: "
            "let all windows of a length run the same code"
        )

    def rewind(self) -> None:
        """Forget the inputs of an earlier rehearsal."""
        self.inputs, self.readbacks, self._num_taken = [], [], 0


def _key(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> object:
    return tuple(values), dtype, device


# At most one. Not by thread: autograd launches a device's work on a thread of its own.
_entered: list[Section] = []


def section() -> Section | None:
    """Return the section that is being rehearsed or captured; None outside of any."""
    return _entered[0] if _entered else None


def is_capturing() -> bool:
    """Whether device work is recorded here and not run: then no event and no value can be looked at."""
    return bool(_entered) and _entered[0].is_capture


def report(problem: str) -> None:
    """Note, in a rehearsal, what a graph could not repeat; raise `CaptureError` in a capture."""
    if is_capturing():
        raise CaptureError(problem)
    if _entered:
        _entered[0].problems.append(problem)


@contextlib.contextmanager
def running(entered: Section, *, is_capture: bool) -> Iterator[None]:
    """Rehearse or capture a section in the body."""
    if _entered:
        raise CaptureError("a section is being captured already: capture one window at a time")
    entered.is_capture = is_capture
    _entered.append(entered)
    try:
        yield
    finally:
        _entered.clear()


@contextlib.contextmanager
def own_copy() -> Iterator[None]:
    """Mark the body's copies between host and device as the engine's own."""
    for entered in _entered:
        entered.is_own_copy = True
    try:
        yield
    finally:
        for entered in _entered:
            entered.is_own_copy = False


class Rehearsal(TorchDispatchMode):
    """Reports what of a section a graph cannot repeat, and lists its operations.

    It reports operations that the host waits for, or that copy from it, each with its line.

    Args:
        is_on_device: whether a tensor is on the device whose work is to be captured.

    Attributes:
        operations: by operation its name, the shapes it has got, its numbers, and its line.
    """

    def __init__(self, is_on_device: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_on_device = is_on_device
        self.operations: list[tuple[str, tuple[Any, ...], str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: otherwise torch would run them without, also ever after."""
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
            report(f"{line}: {name} lets the host wait for a value of the device")
        elif name in ("_to_copy", "copy_") and not all(map(self._is_on_device, [*tensors, result])):
            ends = "to the device" if self._is_on_device(result) else "to the host"
            report(f"{line}: {name} copies {ends}")


def _copies_itself() -> bool:
    return bool(_entered) and _entered[0].is_own_copy


def _plain(leaf: Any) -> Any:
    """Return a number as it is, and of everything else how it reads: nan equals nan then."""
    if isinstance(leaf, int | float) and not math.isnan(leaf):
        return leaf
    is_value = isinstance(leaf, float | str | torch.dtype | torch.device | torch.layout | torch.memory_format)
    return repr(leaf) if is_value else type(leaf).__name__


def difference(one: Rehearsal, other: Rehearsal) -> str:
    """Describe the first operation in which two rehearsals of one section differ; empty if none."""
    for first, second in zip(one.operations, other.operations, strict=False):
        if first[:2] == second[:2]:
            continue
        if first[0] != second[0]:
            return f"{second[2]}: {second[0]} where the window before ran {first[0]} ({first[2]})"
        changed = [(a, b) for a, b in zip(first[1], second[1], strict=False) if a != b]
        was, now = changed[0] if changed else (first[1], second[1])
        what = "a shape" if isinstance(now, tuple) else "a number of the host"
        return f"{second[2]}: {what} of {second[0]} is {now}, and was {was} in the window before"
    longer = max(one.operations, other.operations, key=len)
    short = min(len(one.operations), len(other.operations))
    if len(longer) == short:
        return ""
    name, _, line = longer[short]
    return f"{line}: {name} ran in one of two windows of the same length only"


def _line_of_caller() -> str:
    """Return file and line of the user's frame; of this package's innermost one if there is none."""
    frame, ours = find_caller(sys._getframe(1))  # noqa: SLF001 - `inspect` reads source files
    if frame is None:
        frame = next((each for each in ours if each.f_code.co_filename != __file__), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
