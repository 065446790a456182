"""The unsharded parameters, in whose `.grad` a window's sums lie until they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.slots import Saved, saved_flags
from pyengine.window.nonfinite import flagged_in


class Unsharded:
    """What autograd brings to the unsharded parameters of a model.

    torch shows them to a unit's forward and keeps them, without their memory, from then on. The sums of
    earlier micro-batches stay in their `.grad`, which nobody else touches while gradients do not travel.

    Args:
        model: with units.
        units: its.
        deferred: by unit, whether sums of earlier micro-batches stay here.
        params: the sharded parameters, in registration order; everything here goes by their index.
        dtype: in which narrow gradients are summed; None for their own.
        watches: whether every micro-batch is checked for inf and nan.

    Attributes:
        used: by parameter, whether this window has brought it a gradient here.
        is_void: whether gradients are to be replaced by zeros, and count as none.
        has_arrived: whether any gradient has, since this was last set to False.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        params: Sequence[Parameter],
        *,
        deferred: Sequence[bool],
        dtype: torch.dtype | None,
        watches: bool,
    ) -> None:
        self._dtype, self._watches = dtype, watches
        self._index = {id(param): index for index, param in enumerate(params)}
        self._found: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._waiting: dict[int, Tensor] = {}
        self._rows: list[Tensor] = []
        self._flags: dict[int, Tensor] = {}
        self._device = params[0].device
        self.is_void = self.has_arrived = False
        self.used = [False] * len(params)
        places = _places(model, self._index)
        every = [[self._index[id(param)] for param in unit.params] for unit in units]
        self._units = [indices for indices, is_here in zip(every, deferred, strict=True) if is_here]
        self._wide = {index for indices in self._units for index in indices} if dtype is not None else set()
        for unit, indices in zip(units, every, strict=True):
            find = _Once(partial(self._find, [(index, *places[index]) for index in indices]))
            # Behind FSDP's own, which has shown the parameters by then.
            find.handle = unit.module.register_forward_pre_hook(find)
            self._handles.append(find.handle)

    @property
    def is_known(self) -> bool:
        """Whether a forward has run."""
        return bool(self._found)

    def begin(self) -> None:
        """Start a window with sums of zero."""
        self._waiting = {}
        self._rows, self._flags = [], {}
        self.used = [False] * len(self.used)
        for param in self._found.values():
            param.grad = None

    @contextmanager
    def voided(self) -> Iterator[None]:
        """Let what the body brings be zeros."""
        before, self.is_void = self.is_void, True
        try:
            yield
        finally:
            self.is_void = before

    def count_micro_batch(self) -> None:
        """Note that a micro-batch is done."""
        if self._watches:
            row = torch.zeros(len(self.used), dtype=torch.uint8, device=self._device)
            if self._flags:
                places = torch.tensor(list(self._flags), device=self._device)
                row[places] = torch.stack(list(self._flags.values())).to(torch.uint8)
            self._rows.append(row)
            self._flags = {}

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Give all gradients of a unit one type in the body, the window's last backward: FSDP asks for it.

        Cost: where a unit has sums of earlier micro-batches, zeros in their type for its parameters that none
        of them has used; else nothing.
        """
        narrow = []
        for indices in self._units if self._dtype is not None else []:
            found = [
                param for param in map(self._found.get, indices) if param is not None and param.requires_grad
            ]
            without = [param for param in found if param.grad is None]
            if len(without) == len(found):
                narrow += [param for param in found if param.grad_dtype != param.dtype]
            else:
                for param in without:
                    param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        for param in narrow:
            param.grad_dtype = param.dtype
        try:
            yield
        finally:
            for param in narrow:
                param.grad = None
                param.grad_dtype = self._dtype

    def is_missing(self, index: int) -> bool:
        """Whether a parameter has never been seen unsharded, or is frozen: then nothing is reduced for it."""
        param = self._found.get(index)
        return param is None or not param.requires_grad

    def sums(self) -> dict[int, Tensor]:
        """Return the sums of this window, by parameter: each unsharded, in its type; not copied."""
        grads = {index: param.grad for index, param in self._found.items() if param.grad is not None}
        return {**self._waiting, **grads}

    def take(self) -> dict[int, Tensor]:
        """Return what the micro-batch has brought, by parameter, unsharded, the caller's; it is not here any
        more.
        """
        taken = {index: param.grad for index, param in self._found.items() if param.grad is not None}
        for index in taken:
            self._found[index].grad = None
        return taken

    def save(self, names: Sequence[str]) -> Saved:
        """Return copies of the sums; see `Reducer.save`."""
        rows = torch.stack(self._rows) if self._rows else None
        return {
            names[index]: {
                "sum": grad.reshape(-1).clone(),
                **({} if rows is None else {"nonfinite": rows[:, index].clone()}),
            }
            for index, grad in self.sums().items()
            if self.used[index]
        }

    def load(self, saved: Saved, names: Sequence[str], *, done: int) -> None:
        """Go on from what `save` returned; see `Reducer.load`."""
        for index, name in enumerate(names):
            if name in saved:
                self.used[index] = True
                self._waiting[index] = saved[name]["sum"]
        for index in list(self._found):
            self._resume(index)
        if self._watches:
            self._rows = list(saved_flags(saved, names, done, self._device))

    def blame(self) -> Callable[[int], list[int] | None]:
        """See `Reducer.blame`."""
        rows, watches = self._rows, self._watches
        return lambda index: flagged_in(rows, index) if watches else None

    def release(self) -> None:
        """Let the parameters go."""
        self.begin()
        for param in self._found.values():
            param.grad_dtype = param.dtype
        for handle in self._handles:
            handle.remove()
        self._found = {}

    def _find(self, places: Sequence[tuple[int, nn.Module, str]]) -> None:
        """Take hold of a unit's parameters while its forward has them."""
        for index, module, name in places:
            param: Any = getattr(module, name)
            self._found[index] = param
            if index in self._wide and param.dtype.itemsize < torch.float32.itemsize:
                param.grad_dtype = self._dtype
            if param.requires_grad:
                self._handles.append(param.register_hook(partial(self._arrive, index)))
            self._resume(index)

    def _resume(self, index: int) -> None:
        param = self._found[index]
        if index in self._waiting:
            kept = self._waiting.pop(index)
            param.grad = kept.detach().to(param.device, copy=True).view(param.shape)

    def _arrive(self, index: int, grad: Tensor) -> Tensor | None:
        """Look at a gradient before autograd adds it to the sum."""
        self.has_arrived = True
        if self.is_void:
            return torch.zeros_like(grad)
        self.used[index] = True
        if self._watches:
            flag = ~torch.isfinite(grad).all()
            self._flags[index] = self._flags[index] | flag if index in self._flags else flag
        return None


class _Once:
    """A forward pre-hook that is gone after its first call."""

    handle: Any

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self, module: nn.Module, args: Any) -> None:
        del module, args
        self.handle.remove()
        self._action()


def _places(model: nn.Module, index: Mapping[int, int]) -> dict[int, tuple[nn.Module, str]]:
    """Return the module and attribute of every parameter, by its index."""
    return {
        index[id(param)]: (module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if id(param) in index
    }
