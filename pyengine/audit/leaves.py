"""Where autograd brings a parameter's gradient: the parameter, or what FSDP2 shows in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pyengine.audit.subject import Subject
from pyengine.gradients.fsdp.private import is_unit

# Makes a hook of a leaf. Its argument are the tensors whose `.grad` stays None until the first gradient since
# they were set to None has been accumulated; none where that is no sign.
MakeHook = Callable[[tuple[Tensor, ...]], Callable[[Tensor], None]]


class Leaves:
    """The leaves of a model.

    Args:
        model: whose parameters FSDP2 may have sharded; None: not sharded.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._shown: dict[int, _Shown] = {}
        for param, module, name in [] if model is None else _sharded(model):
            self._shown.setdefault(id(param), _Shown(param, module, name))

    def listen(self, subject: Subject, make_hook: MakeHook) -> list[Any]:
        """Call the hook that is made with the gradient that every backward brings, before it is accumulated.

        Returns:
            Handles.
        """
        param = subject.tensor
        shown = self._shown.get(id(param))
        return [_hooked(param, param, make_hook) if shown is None else shown.listen(make_hook)]


class _Shown:
    """What FSDP shows to forwards in place of a sharded parameter: always the same leaf.

    Attributes:
        leaf: None until the first forward.
    """

    def __init__(self, param: Tensor, module: nn.Module, name: str) -> None:
        self._param, self._name = param, name
        self.leaf: Tensor | None = None
        self._waiting: list[tuple[MakeHook, _Later]] = []
        # Behind FSDP's own, which shows it.
        self._handle = module.register_forward_pre_hook(self._find)

    def listen(self, make_hook: MakeHook) -> Any:
        """Hook it to the leaf, now or when it is shown."""
        if self.leaf is not None:
            return _hooked(self.leaf, self._param, make_hook)
        handle = _Later()
        self._waiting.append((make_hook, handle))
        return handle

    def _find(self, module: nn.Module, _: Any) -> None:
        leaf: Tensor = getattr(module, self._name)
        if leaf is self._param or not leaf.requires_grad:
            return
        self._handle.remove()
        self.leaf = leaf
        for make_hook, handle in self._waiting:
            if not handle.is_removed:
                handle.kept = _hooked(leaf, self._param, make_hook)
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


def _hooked(leaf: Tensor, param: Any, make_hook: MakeHook) -> Any:
    # Megatron sets `.grad` to None behind every micro-batch: there None is no sign.
    owners = () if hasattr(param, "main_grad") else (leaf,) if leaf is param else (leaf, param)
    hook = make_hook(owners)

    def accumulated(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            hook(grads[0])

    # A hook of the leaf itself would run for torch.autograd.grad, too, which accumulates nothing.
    node = get_gradient_edge(leaf).node
    return _OnNode(node, node.register_prehook(accumulated))


class _OnNode:
    """The handle of a hook of an autograd node, which lives no longer than the node."""

    def __init__(self, node: Any, handle: Any) -> None:
        self._node, self._handle = node, handle

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def _sharded(model: nn.Module) -> Iterator[tuple[Tensor, nn.Module, str]]:
    """Yield every parameter that FSDP2 exchanges for forwards, with its module and attribute."""
    if not any(is_unit(module) for module in model.modules()):
        return
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if hasattr(param, "to_local"):
                yield param, module, name
