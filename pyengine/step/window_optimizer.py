"""Optimizers that use the gradients of an engine: which parameters they may step, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pyengine.ops.device import runs_ahead
from pyengine.window.digest import OptimizerStep


def check_step(optimizer: Any, scheduler: Any) -> None:
    """Raise TypeError if the optimizer or scheduler cannot be stepped; called before either is stepped."""
    if getattr(optimizer, "steps_with_windows", False):
        raise TypeError(
            "optimizer is already wrapped, and steps when its window ends: call optimizer.step(), or pass "
            "the plain optimizer, optimizer.optimizer"
        )
    if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "optimizer is an LBFGS, whose step() runs forward and backward again through a closure, but a "
            "window has only one gradient: use an optimizer that steps with a given gradient, for example "
            "torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "optimizer is a SparseAdam, which accepts only sparse gradients, but an engine sums dense "
            "gradients: use torch.optim.Adam for these parameters"
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__} with overlap_with_ddp=True, which updates "
            "parameters in DDP's communication hook instead of in step(): leave overlap_with_ddp out"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler is a ReduceLROnPlateau, whose step() takes a metric: leave it out, and call "
            "scheduler.step(metric) yourself"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__}: expected an object with a step() method, or None"
        )


def _of_the_wrapped(name: str) -> Any:
    """Return a property that reads and writes an attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class WindowOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only at the end of a window; created by `sync.wrap`.

    Everything except `step` and `zero_grad` is forwarded to the wrapped optimizer. `zero_grad` does nothing
    in the middle of a window.

    A copy (`copy.deepcopy`, `pickle`) contains a copy of the wrapped optimizer and belongs to no engine, so
    its `step` raises an error. Use `sync.wrap(copy.optimizer)` instead.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    steps_with_windows = True
    # False, because the wrapped optimizer would not see attributes that torch's GradScaler sets here.
    _step_supports_amp_scaling = False

    state = _of_the_wrapped("state")
    param_groups = _of_the_wrapped("param_groups")
    defaults = _of_the_wrapped("defaults")
    state_dict = _of_the_wrapped("state_dict")
    load_state_dict = _of_the_wrapped("load_state_dict")
    add_param_group = _of_the_wrapped("add_param_group")
    register_step_pre_hook = _of_the_wrapped("register_step_pre_hook")
    register_step_post_hook = _of_the_wrapped("register_step_post_hook")
    register_state_dict_pre_hook = _of_the_wrapped("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_the_wrapped("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_the_wrapped("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_the_wrapped("register_load_state_dict_post_hook")

    def __init__(self, sync: Any, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        # super().__init__ is not called, because it would create separate parameter groups and state.
        check_step(optimizer, scheduler)
        self.optimizer = optimizer
        self._stepped: torch.Tensor | None = None
        self._stepped_in: object | None = None
        self._sync = sync  # the `Sync` that created this optimizer; None in a copy
        self._scheduler = scheduler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step at the end of a window was skipped.

        On an accelerator, reading this property blocks the host.
        """
        return self._stepped is not None and not bool(self._stepped)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no return value
        """Step the optimizer and the scheduler if this micro-batch ends its window.

        Raises:
            RuntimeError: this is a copy; or a `loss.backward()` outside of any window has left gradients that
                no step would use; or one of the errors of `sync.step`.
        """
        if self._sync is None:
            raise RuntimeError(
                "step: this optimizer is a copy, and belongs to no engine: step "
                "`sync.wrap(copy.optimizer)` instead"
            )
        if closure is not None:
            raise ValueError(
                "step: got a closure, but the gradients have already been computed: call backward before "
                "step()"
            )
        reduced = self._sync.reduced_window
        if self._sync.is_sync_step and (reduced is None or reduced is not self._stepped_in):
            self._stepped = self._sync.step(self.optimizer, self._scheduler)
            self._stepped_in = self._sync.reduced_window
        else:
            self._sync.refuse_bare_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of a window that has ended; otherwise do nothing.

        The engine clears used gradients automatically in the first backward of the next window.
        """
        if self._sync is not None and self._sync.reduced_window is not None:
            self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # copy or pickle has not filled this object yet
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_scheduler": self._scheduler, "_stepped": self._stepped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _sync=None, _stepped_in=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class OptimizerCheck:
    """Checks that optimizers step only parameters that an engine reduces or that DDP ignores."""

    def __init__(self, params: Sequence[Parameter], ignored: Sequence[Parameter] = ()) -> None:
        self._ignored = {id(param) for param in ignored}
        self._index = {id(param): index for index, param in enumerate(params) if param.requires_grad}
        self._looked: WeakKeyDictionary[Any, _Looked] = WeakKeyDictionary()

    def of(
        self, optimizer: torch.optim.Optimizer, *, is_handed_over: bool
    ) -> tuple[OptimizerStep, list[Tensor]]:
        """Return a description of the step, and copies of hyperparameters that are on an accelerator.

        The parameters of an optimizer are checked again only if they differ from those of its last step.
        """
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
        looked = self._looked.get(optimizer)
        if looked is None or looked.ids != ids:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            # Sort the indices, because sets and dicts of parameters may have a different order in every
            # process.
            indices = tuple(
                tuple(sorted(self._index[id(param)] for param in group["params"] if id(param) in self._index))
                for group in optimizer.param_groups
            )
            foreign = [param for param in params if id(param) not in self._index]
            looked = self._looked[optimizer] = _Looked(ids, indices, foreign)
        if ids and not any(looked.indices) and any(key not in self._ignored for key in ids):
            raise ValueError(
                "optimizer has none of this engine's parameters, so its step would change nothing: create "
                "the optimizer from model.parameters(), after everything that replaces parameters "
                "(fully_shard, replicate, a move to another device)"
            )
        for param in looked.foreign:
            if param.grad is None:
                continue
            if id(param) not in self._ignored:
                raise ValueError(
                    f"optimizer has a parameter of shape {list(param.shape)} whose gradient this engine does "
                    "not reduce, because the parameter was added, replaced or unfrozen after the engine was "
                    "made: make the GradSync after the model is complete"
                )
            if any(looked.indices) and not is_handed_over:
                raise ValueError(
                    f"optimizer has a parameter of shape {list(param.shape)} that DDP ignores: its gradient "
                    "is a sum over this rank's micro-batches, which includes the loss scale, whereas "
                    "other gradients are means. Use a separate optimizer for such parameters, or call "
                    "sync.unscale_() first and scale their gradients yourself"
                )
        numbers, tensors = hyperparameters(optimizer)
        copies = [tensor.clone() for tensor in tensors]
        return OptimizerStep(type(optimizer).__name__, looked.indices, numbers), copies


@dataclass(frozen=True)
class _Looked:
    """The parameters of an optimizer: all ids, indices of the engine's parameters, and foreign parameters."""

    ids: list[int]
    indices: tuple[tuple[int, ...], ...]
    foreign: list[Parameter]


def hyperparameters(
    optimizer: torch.optim.Optimizer,
) -> tuple[tuple[tuple[str, float | str], ...], list[Tensor]]:
    """Return the numbers and strings of every group, learning rate first, and the tensors on accelerators.

    A group may have keys without a default in its optimizer, such as timm's `lr_scale` or `initial_lr`.
    """
    numbers: list[tuple[str, float | str]] = []
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        for name in _sorted_names(tuple(group)):
            value = group[name]
            for item in value if isinstance(value, tuple | list) else [value]:
                if isinstance(item, Tensor) and item.numel() != 1:
                    continue
                if isinstance(item, Tensor) and runs_ahead(item.device):
                    tensors.append(item)
                elif isinstance(item, int | float | Tensor | Real):  # test the most frequent types first
                    numbers.append((name, float(item)))
                elif isinstance(value, str):  # for example Muon's adjust_lr_fn; lists of names are skipped
                    numbers.append((name, value))
    return tuple(numbers), tensors


@cache
def _sorted_names(keys: tuple[str, ...]) -> list[str]:
    """Return the keys of a group in the same order on every rank, learning rate first."""
    return sorted(set(keys) - {"params"}, key=lambda key: (key != "lr", str(key)))
