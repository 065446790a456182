"""Unsharded parameters, whose `.grad` holds a window's sums until the reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.gradients.fsdp.private import compute_dtypes, reduce_dtype
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.local_part import in_placements
from pyengine.gradients.settings import Settings
from pyengine.gradients.slots import local
from pyengine.window.nonfinite import flagged_in


class Unsharded:
    """The gradients that autograd accumulates into the unsharded parameters of a model.

    The forward of a unit sets the unsharded parameters as module attributes. After the forward torch keeps
    the Parameter objects and frees only their memory. Their `.grad` holds the sums of earlier micro-batches,
    and torch does not change it until gradients are reduced.

    Args:
        params: the sharded parameters, in registration order; all indices here refer to this order.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        params: Sequence[Parameter],
        *,
        settings: Settings,
    ) -> None:
        # For exact sums, incoming gradients are checked in the dtype in which they were computed. Without
        # exact sums, gradients are summed in the unit's reduce dtype, and checked when they arrive.
        self._widens = settings.kind != "exact"
        self._watches = self._widens and settings.raises
        # ---- unsharded parameters by index, known after the first forward of each unit ----
        self._index = {id(param): index for index, param in enumerate(params)}
        self._found: dict[int, Any] = {}
        self._handles: list[Any] = []
        # ---- gradients of this window ----
        # For exact sums, this micro-batch's gradients, which are hidden from FSDP, because FSDP may cast any
        # `.grad` that it finds at the end of a backward.
        self._hidden: dict[int, Tensor] = {}
        # ---- flags: 1 if a gradient is not finite ----
        self._arriving: dict[int, Tensor] = {}  # flags of gradients that autograd is about to accumulate
        self._rows: list[Tensor] = []
        self._flags: dict[int, Tensor] = {}
        self._device = params[0].device
        self.is_void = False  # Whether gradients are replaced by zeros and their parameters count as unused.
        self.has_arrived = False  # Whether any gradient has been accumulated since the last reset.
        # Indices of parameters whose gradient has been accumulated since the last clear; includes padding.
        self.arrived: set[int] = set()
        # Called when a backward accumulates another gradient of a parameter in `arrived`.
        self.on_repeat: Callable[[], None] = lambda: None
        self.used = [False] * len(params)  # per parameter, whether this rank has a gradient in this window
        places = _places(model, self._index)
        self._units: list[list[int]] = []
        self._sum_types: dict[int, torch.dtype] = {}  # dtypes of deferred sums
        self._earlier_types: dict[int, torch.dtype | None] = {}  # values of `grad_dtype`, to be restored
        for unit in units:
            indices = [self._index[id(param)] for param in unit.params]
            if unit.mode == "all":  # sums of earlier micro-batches stay here
                self._units.append(indices)
                self._sum_types |= zip(indices, _sum_types(unit), strict=True)
            self._register_in_forward(unit.module, [(index, *places[index]) for index in indices])

    @property
    def has_run(self) -> bool:
        return bool(self._found)

    def begin(self) -> None:
        """Start a window with empty sums."""
        self._hidden = {}
        self._rows, self._flags = [], {}
        self.used = [False] * len(self.used)
        for param in self._found.values():
            param.grad = None

    @contextmanager
    def zeroed(self) -> Iterator[None]:
        """Replace the gradients of all backwards in the body with zeros."""
        before, self.is_void = self.is_void, True
        try:
            yield
        finally:
            self.is_void = before

    def count_micro_batch(self) -> None:
        """Finish a micro-batch: append its flags, unless it is padding."""
        if self._watches and not self.is_void:
            row = torch.zeros(len(self.used), dtype=torch.uint8, device=self._device)
            if self._flags:
                places = torch.tensor(list(self._flags), dtype=torch.int64, device=self._device)
                row[places] = torch.stack(list(self._flags.values())).to(torch.uint8)
            self._rows.append(row)
        self._flags = {}

    @contextmanager
    def one_grad_dtype(self) -> Iterator[None]:
        """Give all gradients of a unit the same dtype during the window's last backward, as FSDP requires.

        Cost: none, unless a unit has sums of earlier micro-batches. In that case, zeros in the dtype of the
        sums are allocated for each parameter that the earlier micro-batches have not used.
        """
        narrow = []
        for indices in self._units:
            found = [
                param
                for param in map(self._found.get, indices)
                if param is not None and (param.requires_grad or param.grad is not None)
            ]
            without = [param for param in found if param.grad is None]
            wide = [param for param in found if param.grad_dtype != param.dtype]
            if len(without) == len(found):
                narrow += wide
            elif wide:
                for param in without:
                    param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        before = [param.grad_dtype for param in narrow]
        for param in narrow:
            param.grad_dtype = param.dtype
        try:
            yield
        finally:
            for param, dtype in zip(narrow, before, strict=True):
                param.grad = None
                param.grad_dtype = dtype

    def first_with_grad(self) -> int | None:
        """Return the index of the first parameter with an unsharded gradient; None if there is none."""
        return min((index for index, param in self._found.items() if param.grad is not None), default=None)

    def is_missing(self, index: int) -> bool:
        """Whether a parameter has never been unsharded, or is frozen."""
        param = self._found.get(index)
        return param is None or not param.requires_grad

    def grad_holders(self) -> list[Any]:
        """Return the unsharded parameters by index; None for parameters that no forward has unsharded."""
        self._restore_hidden()
        return [self._found.get(index) for index in range(len(self.used))]

    def pop_grads(self) -> dict[int, Tensor]:
        """Return the unsharded gradients of the micro-batch by index, and set `.grad` to None."""
        self._restore_hidden()
        grads = {index: param.grad for index, param in self._found.items() if param.grad is not None}
        for index in grads:
            self._found[index].grad = None
        return grads

    def blame(self) -> Callable[[int], list[int] | None]:
        """See `Reducer.blame`."""
        rows, watches = self._rows, self._watches
        return lambda index: flagged_in(rows, index) if watches else None

    def release(self) -> None:
        self.begin()
        for index, dtype in self._earlier_types.items():
            self._found[index].grad_dtype = dtype
        self._earlier_types = {}
        for handle in self._handles:
            handle.remove()
        self._found = {}

    def _register_in_forward(self, unit: nn.Module, places: Sequence[tuple[int, nn.Module, str]]) -> None:
        """Call `_register_params` in the next forward of the unit."""

        def register(*_: Any) -> None:
            handle.remove()
            self._register_params(places)

        # This hook runs after FSDP's own pre-hook, which unshards the parameters.
        handle = unit.register_forward_pre_hook(register)
        self._handles.append(handle)

    def _register_params(self, places: Sequence[tuple[int, nn.Module, str]]) -> None:
        """Register hooks on the unsharded parameters of a unit, during its forward."""
        for index, module, name in places:
            param: Any = getattr(module, name)
            self._found[index] = param
            dtype = self._sum_types.get(index, param.dtype) if self._widens else param.dtype
            if param.grad_dtype != dtype and (dtype != param.dtype or not self._widens):
                self._earlier_types[index], param.grad_dtype = param.grad_dtype, dtype
            if param.requires_grad:
                self._handles += [
                    param.register_hook(partial(self._on_gradient, index)),
                    param.register_post_accumulate_grad_hook(partial(self._on_accumulated, index)),
                ]

    def _on_accumulated(self, index: int, param: Any) -> None:
        """Record that autograd has accumulated a gradient.

        `torch.autograd.grad` calls only the tensor hook (`_on_gradient`), because it accumulates no gradient.
        """
        self.has_arrived = True
        if index in self.arrived:
            self.on_repeat()
        self.arrived.add(index)
        if not self.is_void:
            self.used[index] = True
            if self._watches:
                flag = self._arriving.pop(index)
                self._flags[index] = self._flags[index] | flag if index in self._flags else flag
        if not self._widens:
            grad, param.grad = param.grad, None
            # Gradients of several backwards are added here as autograd adds them.
            self._hidden[index] = self._hidden[index] + grad if index in self._hidden else grad

    def _restore_hidden(self) -> None:
        """Set `.grad` to the hidden gradients, after the backwards of the micro-batch."""
        for index, grad in self._hidden.items():
            self._found[index].grad = grad
        self._hidden = {}

    def _on_gradient(self, index: int, grad: Tensor) -> Tensor | None:
        """Check a gradient before autograd accumulates it; redistribute the gradient of a DTensor."""
        if self.is_void:
            return torch.zeros_like(grad)
        redistributed = in_placements(grad, self._found[index])
        if self._watches:
            self._arriving[index] = ~torch.isfinite(local(redistributed)).all()
        return None if redistributed is grad else redistributed


def _sum_types(unit: Unit) -> list[torch.dtype]:
    """Return the dtype in which the unsharded gradients of each parameter of a unit are summed."""
    reduced, dtypes = reduce_dtype(unit.module), compute_dtypes(unit.module)
    return [reduced if reduced and reduced.itemsize > dtype.itemsize else dtype for dtype in dtypes]


def _places(model: nn.Module, index: Mapping[int, int]) -> dict[int, tuple[nn.Module, str]]:
    """Return the module and attribute name of every parameter, by parameter index."""
    return {
        index[id(param)]: (module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if id(param) in index
    }
