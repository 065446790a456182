"""The part of a DTensor parameter that lies on this rank, seen as a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.slots import as_gradient, local


class LocalPart:
    """What buckets need of a parameter, for the local part of a DTensor: `.grad` is that of the DTensor's.

    A gradient that a backward leaves in other placements than the parameter's (partial sums, say) is
    redistributed as soon as it has been accumulated: at the same point of the backward on every rank of its
    mesh, and a collective there.

    Args:
        param: a leaf, whose placements shard or replicate.
    """

    def __init__(self, param: Any) -> None:
        self._param = param
        self._read: tuple[Tensor, Tensor] | None = None
        self._hook: Any = (
            param.register_post_accumulate_grad_hook(_redistribute_grad) if param.requires_grad else None
        )

    @property
    def grad(self) -> Tensor | None:
        """The local part of the gradient, in its memory; to be set to a tensor of the local part's shape."""
        grad = self._param.grad
        if grad is None:
            self._read = None
        elif self._read is None or self._read[0] is not grad:
            self._read = grad, local(grad)
        return None if self._read is None else self._read[1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._read = self._param.grad = None
        elif self._read is None or self._read[1] is not value or self._param.grad is not self._read[0]:
            whole = as_gradient(value, self._param)
            self._param.grad, self._read = whole, (whole, value)

    @property
    def grad_version(self) -> int:
        """How often autograd has written to the gradient; its local part does not tell."""
        return 0 if self._param.grad is None else self._param.grad._version

    def release(self) -> None:
        """Take the hook off the parameter."""
        if self._hook is not None:
            self._hook.remove()

    def detach(self) -> Tensor:
        """Return the local part, in its memory."""
        return local(self._param)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call `hook` where torch does for the DTensor."""
        return self._param.register_post_accumulate_grad_hook(hook)

    @property
    def requires_grad(self) -> bool:
        """Whether the DTensor requires a gradient."""
        return bool(self._param.requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.detach(), name)  # shape, strides and type are the local part's


def is_dtensor(param: Any) -> bool:
    """Whether a tensor is a DTensor; their module, which takes a second to load, is not loaded."""
    return hasattr(param, "to_local")


def local_parts(params: Sequence[Parameter]) -> list[Parameter]:
    """Return parameters with the local part in place of every DTensor."""
    return [cast(Parameter, LocalPart(param)) if is_dtensor(param) else param for param in params]


def grad_version(param: Parameter) -> int:
    """Return how often autograd has written to `.grad`, which is there."""
    if isinstance(param, LocalPart):
        return param.grad_version
    assert param.grad is not None
    return param.grad._version


def release(params: Sequence[Parameter]) -> None:
    """Take off DTensors what `local_parts` has put there."""
    for param in params:
        if isinstance(param, LocalPart):
            param.release()


def _redistribute_grad(param: Any) -> None:
    """Bring the gradient into the parameter's placements."""
    redistributed = in_placements(param.grad, param)
    if redistributed is not param.grad:
        param.grad = redistributed


def in_placements(grad: Any, param: Any) -> Any:
    """Return a gradient in the placements of its parameter: itself where it is, or where that is a plain
    tensor; else a collective of its mesh's ranks.
    """
    if not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        raise TypeError(
            f"a DTensor parameter of shape {list(param.shape)} got a plain tensor as its gradient"
        )
    if grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)
