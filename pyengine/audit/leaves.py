"""Where autograd brings a parameter's gradient: the parameter, or what FSDP2 shows in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from pyengine.audit.subject import Subject
from pyengine.gradients.fsdp.private import is_unit

Listener = Callable[[Tensor, bool], None]


class Leaves:
    """The leaves of a model.

    Args:
        model: whose parameters FSDP2 may have sharded; None: nobody has.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._shown: dict[int, _Shown] = {}
        for param, module, name in [] if model is None else _sharded(model):
            self._shown.setdefault(id(param), _Shown(param, module, name))

    def listen(self, subject: Subject, listener: Listener) -> list[Any]:
        """Call `listener(gradient, is_first)` with what every backward brings, before it is accumulated.

        `is_first`: nothing has been accumulated yet since gradients were set to None.

        Returns:
            Handles.
        """
        param = subject.tensor
        shown = self._shown.get(id(param))
        return [_hooked(param, param, listener) if shown is None else shown.listen(listener)]


class _Shown:
    """What FSDP shows to forwards in place of a sharded parameter: always the same leaf.

    Attributes:
        leaf: None until the first forward.
    """

    def __init__(self, param: Tensor, module: nn.Module, name: str) -> None:
        self._param, self._name = param, name
        self.leaf: Tensor | None = None
        self._waiting: list[tuple[Listener, _Later]] = []
        # Behind FSDP's own, which shows it.
        self._handle = module.register_forward_pre_hook(self._find)

    def listen(self, listener: Listener) -> Any:
        """Hook the listener to the leaf, now or when it is shown."""
        if self.leaf is not None:
            return _hooked(self.leaf, self._param, listener)
        handle = _Later()
        self._waiting.append((listener, handle))
        return handle

    def _find(self, module: nn.Module, _: Any) -> None:
        leaf: Tensor = getattr(module, self._name)
        if leaf is self._param or not leaf.requires_grad:
            return
        self._handle.remove()
        self.leaf = leaf
        for listener, handle in self._waiting:
            if not handle.is_removed:
                handle.kept = _hooked(leaf, self._param, listener)
        self._waiting = []


class _Later:
    """The handle of a hook that is still to come."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.is_removed = False

    def remove(self) -> None:
        self.is_removed = True
        if self.kept is not None:
            self.kept.remove()


def _hooked(leaf: Tensor, param: Any, listener: Listener) -> Any:
    # Megatron takes `.grad` away behind every micro-batch: there None says nothing.
    restarts = not hasattr(param, "main_grad")
    return leaf.register_hook(partial(_arrive, leaf, param, listener, restarts))


def _arrive(leaf: Tensor, param: Tensor, listener: Listener, restarts: bool, grad: Tensor) -> None:
    listener(grad, restarts and leaf.grad is None and param.grad is None)


def _sharded(model: nn.Module) -> Iterator[tuple[Tensor, nn.Module, str]]:
    """Yield every parameter that FSDP2 exchanges for forwards, with its module and attribute."""
    if not any(is_unit(module) for module in model.modules()):
        return
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if hasattr(param, "to_local"):
                yield param, module, name
