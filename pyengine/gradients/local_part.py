"""The local tensor of a DTensor parameter, with the interface of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.slots import as_gradient, local


class LocalPart:
    """The local tensor of a DTensor parameter, with the interface of a parameter.

    The `.grad` of a `LocalPart` is the local tensor of the DTensor's `.grad`. A backward may leave a gradient
    whose placements differ from those of the parameter, for example partial sums. In that case a collective
    redistributes the gradient as soon as it has been accumulated, at the same point of the backward on every
    rank of the mesh.
    """

    def __init__(self, param: Any) -> None:
        self.param = param
        self._read: tuple[Tensor, Tensor] | None = None
        self._hook: Any = (
            param.register_post_accumulate_grad_hook(_redistribute_grad) if param.requires_grad else None
        )

    @property
    def grad(self) -> Tensor | None:
        """The local tensor of the gradient, in the gradient's memory. Can be set."""
        grad = self.param.grad
        if grad is None:
            self._read = None
        elif self._read is None or self._read[0] is not grad:
            self._read = grad, local(grad)
        return None if self._read is None else self._read[1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._read = self.param.grad = None
        elif self._read is None or self._read[1] is not value or self.param.grad is not self._read[0]:
            whole = as_gradient(value, self.param)
            self.param.grad, self._read = whole, (whole, value)

    @property
    def grad_version(self) -> int:
        """The number of times that autograd has written to the DTensor's gradient."""
        return 0 if self.param.grad is None else self.param.grad._version

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def detach(self) -> Tensor:
        return local(self.param)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        return self.param.register_post_accumulate_grad_hook(hook)

    @property
    def requires_grad(self) -> bool:
        return bool(self.param.requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.detach(), name)  # shape, strides and dtype of the local tensor


def is_dtensor(param: Any) -> bool:
    # `isinstance` would require importing DTensor's module, which takes about a second.
    return hasattr(param, "to_local")


def local_parts(params: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters, with a `LocalPart` in place of every DTensor."""
    return [cast(Parameter, LocalPart(param)) if is_dtensor(param) else param for param in params]


def whole(param: Parameter) -> Parameter:
    """Return the DTensor parameter of a `LocalPart`, or the parameter itself."""
    return cast(Parameter, param.param) if isinstance(param, LocalPart) else param


def grad_version(param: Parameter) -> int:
    """Return the number of times that autograd has written to `.grad`."""
    if isinstance(param, LocalPart):
        return param.grad_version
    assert param.grad is not None
    return param.grad._version


def release(params: Sequence[Parameter]) -> None:
    """Remove the hooks that `local_parts` has registered on DTensors."""
    for param in params:
        if isinstance(param, LocalPart):
            param.release()


def _redistribute_grad(param: Any) -> None:
    """Redistribute a gradient to the placements of its parameter."""
    redistributed = in_placements(param.grad, param)
    if redistributed is not param.grad:
        param.grad = redistributed


def in_placements(grad: Any, param: Any) -> Any:
    """Return a gradient with the placements of its parameter, redistributed if necessary."""
    if not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        raise TypeError(
            f"the gradient of a DTensor parameter of shape {list(param.shape)} is a plain tensor: expected a "
            "DTensor on the same mesh"
        )
    if grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)
