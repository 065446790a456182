"""The mean gradients in `.grad` after a reduction, which are read and scaled in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, get_total_norm

from pyengine.comm.base import by_dtype
from pyengine.gradients.bucket import aligned
from pyengine.gradients.grad_versions import GradVersions
from pyengine.gradients.local_part import is_dtensor
from pyengine.gradients.norms import ReducedNorms
from pyengine.gradients.slots import dense, dense_strides, local
from pyengine.ops.device import is_lazy, runs_ahead
from pyengine.ops.pointers import DTYPE_CODES, keeps_elements_elsewhere
from pyengine.window.final_pass import FinalPass
from pyengine.window.nonfinite import is_not_finite


class Published:
    """The gradients in `.grad` of an engine's parameters, as they are at the time of each call.

    The user may have written to the gradients or replaced them with other tensors. These methods read and
    scale the tensors that an optimizer step would use.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Parameter]) -> None:
        self._names, self._params = names, list(params)
        self._device = device = params[0].device
        self._is_lazy = is_lazy(device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._index = {id(param): place for place, param in enumerate(params)}
        self._groups: list[list[Parameter]] = []  # Parameters that the fused calls cover, by dtype.
        # On a lazy device there are no fused calls, because tensors have no addresses for the native core.
        self._rest = [] if is_lazy(device) else [param for param in params if param.dtype in DTYPE_CODES]
        self._then = GradVersions(self._params)
        self._dtensors: list[Any] = [param for param in self._params if is_dtensor(param)]
        self._lay_out([param for param in self._rest if param.requires_grad])
        self.record()

    def _lay_out(self, params: Sequence[Parameter]) -> None:
        """Add parameters to the fused calls; frozen parameters are added once they have a gradient."""
        self._groups = by_dtype([*itertools.chain(*self._groups), *params])
        plans = [aligned([local(param).numel() for param in group], 1) for group in self._groups]
        indices = [[self._index[id(param)] for param in group] for group in self._groups]
        self._norms = ReducedNorms(list(zip(plans, indices, strict=True)), self._device)
        added = set(map(id, params))
        self._rest = [param for param in self._rest if id(param) not in added]

    def _grouped(self) -> list[list[Tensor | None]]:
        """Return the gradients by dtype, in the order of `_norms`."""
        if unfrozen := [param for param in self._rest if param.grad is not None]:
            self._lay_out(unfrozen)
        return list(map(_flat_grads, self._groups))

    def record(self) -> None:
        """Record the current gradients, for `has_changed`."""
        grads = self._then.record()
        if self._dtensors:
            self._local_versions = self._local_versions_now()
        # An assignment to `.grad.data` replaces the memory but keeps the version, so addresses are compared
        # too.
        self._addresses = self._addresses_of(grads)

    def has_any(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(map(_has_grad, self._params))

    def has_changed(self) -> bool:
        """Whether gradients have been written to or replaced since `record`."""
        if self._then.changed():
            return True
        if self._dtensors and self._local_versions != self._local_versions_now():
            return True
        grads = [param.grad for param in self._params if param.grad is not None]
        return self._addresses != self._addresses_of(grads)

    def changed(self) -> list[int]:
        """Return the indices of gradients that have been written to or replaced since `record`."""
        return self._then.changed()

    def _local_versions_now(self) -> list[int]:
        """Return the versions of DTensors' local tensors, which are separate from those of the DTensors."""
        return [param.grad.to_local()._version for param in self._dtensors if param.grad is not None]

    @torch.no_grad()
    def read(self, final: FinalPass, scale: Tensor | None = None) -> None:
        """Write norms and non-finite flags to `final`; multiply the gradients by `scale` (float32, 0-dim).

        Cost: one read per element, and with `scale` one write. Tensors that the native core cannot address
        are copied.

        Raises:
            ValueError: a gradient was replaced by a tensor whose elements cannot be read.
        """
        if self._is_lazy:
            assert scale is None
            norms = self.norms()
            final.sumsq, final.nonfinite = norms.square(), is_not_finite(norms).to(torch.uint8)
            return
        self._read(scale)
        self._norms.copy_to(final)

    def flags(self) -> Tensor:
        """Return uint8 flags of shape `[parameters]`: 1 for each gradient that contains inf or nan.

        Not supported on a lazy device.

        Cost: one read per element.
        """
        flags = torch.zeros(len(self._params), dtype=torch.uint8, device=self._device)
        self._read(None)
        self._norms.copy_flags_to(flags)
        return flags

    def _read(self, scale: Tensor | None) -> None:
        """Compute the norms and flags of the gradients, and multiply the gradients by `scale`."""
        groups = self._grouped()
        self._norms.begin()
        for place, grads in enumerate(groups):
            if scale is not None:
                self._norms.read(place, grads, grads, scale)
                continue
            try:
                self._norms.read(place, grads, None, self._one)
            except (TypeError, ValueError):  # the core cannot address a replaced .grad
                self._norms.read(place, self._copied(self._groups[place]), None, self._one)

    @torch.no_grad()
    def scale_(self, scale: Tensor) -> None:
        """Multiply every gradient by `scale` (float32, 0-dim)."""
        if self._is_lazy:  # the compiler fuses this with the next use of the gradients
            for param in self._params:
                if param.grad is not None:
                    param.grad = (param.grad.float() * scale).to(param.dtype)
            return
        for place, grads in enumerate(self._grouped()):
            try:
                # Only the scaling matters here: `_read` resets the norms and flags before it uses them.
                self._norms.read(place, grads, grads, scale)
            except (TypeError, ValueError):  # The core cannot address a replaced .grad.
                for grad in grads:
                    if grad is not None:
                        grad.mul_(scale)

    @torch.no_grad()
    def scale_each_(self, factors: Tensor) -> None:
        """Multiply each gradient by its factor in `factors`, float32 `[parameters]`.

        Cost: on an accelerator, one launch per parameter. On the host, a factor of 1 costs nothing.
        """
        for grad, factor in zip(local_grads(self._params), factors.unbind(), strict=True):
            if grad is not None and (runs_ahead(self._device) or float(factor) != 1):
                grad.mul_(factor)

    def _copied(self, params: Sequence[Parameter]) -> list[Tensor | None]:
        """Return copies of gradients, as plain float32 tensors on the device.

        Raises:
            ValueError: a gradient cannot be read.
        """
        copies: list[Tensor | None] = []
        for param, grad in zip(params, local_grads(params), strict=True):
            if grad is not None and (keeps_elements_elsewhere(grad) or grad.numel() != local(param).numel()):
                name = self._names[self._index[id(param)]]
                raise ValueError(
                    f"the .grad of {name!r} is a {type(param.grad).__name__} with {grad.numel()} elements on "
                    f"this rank: replace it with a plain tensor of {local(param).numel()} elements before "
                    "its norm is computed"
                )
            wide = None if grad is None else dense(grad).to(self._device, torch.float32)
            copies.append(None if wide is None else wide.clone(memory_format=torch.contiguous_format))
        return copies

    def _addresses_of(self, grads: Sequence[Tensor]) -> list[int]:
        """Return the addresses of gradients; empty on a lazy device, where tensors have no addresses."""
        if self._is_lazy:
            return []
        try:
            return list(map(Tensor.data_ptr, grads))
        except RuntimeError:  # DTensors and sparse gradients have no address
            return list(map(_address, map(local, grads)))

    @torch.no_grad()
    def largest(self) -> Tensor:
        """Return the largest absolute value in this rank's gradients, as a 0-dim float64 tensor.

        The result is nan if a gradient contains nan, and 0 if there are no gradients.
        """
        grads = [dense(grad) for grad in local_grads(self._params) if grad is not None and grad.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return get_total_norm(grads, math.inf).double()  # a maximum is exact in every dtype

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the 2-norm of every local gradient as float64 `[parameters]`; 0 for a missing gradient.

        Cost: one read per element, and a copy in float64.
        """
        none = torch.zeros((), dtype=torch.float64, device=self._device)
        grads = local_grads(self._params)
        return torch.stack([none if grad is None else grad.double().norm() for grad in grads])

    @torch.no_grad()
    def clip_values_(self, value: float) -> None:
        """Clip every element to [-value, value], in place."""
        grads = [grad for grad in local_grads(self._params) if grad is not None]
        if grads:  # torch does not accept an empty list
            held: list[Any] = [SimpleNamespace(grad=grad) for grad in grads]
            clip_grad_value_(held, value)


def _has_grad(param: Parameter) -> bool:
    return param.grad is not None


def _address(grad: Tensor) -> int:
    return 0 if grad.layout is not torch.strided else grad.data_ptr()


def local_grads(params: Sequence[Parameter]) -> list[Tensor | None]:
    """Return this rank's local tensor of every gradient; None for a missing gradient."""
    return [None if param.grad is None else local(param.grad) for param in params]


def _flat_grads(params: Sequence[Parameter]) -> list[Tensor | None]:
    """Return this rank's local gradients; non-contiguous gradients become 1-D, in storage order."""
    return [
        grad if grad is None or (type(grad) is Tensor and grad.is_contiguous()) else _flat(local(grad))
        for grad in [param.grad for param in params]
    ]


def _flat(grad: Tensor) -> Tensor:
    """Return a dense gradient as a 1-D tensor in storage order."""
    if grad.layout is not torch.strided or grad.is_contiguous() or grad.stride() != dense_strides(grad):
        return grad
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
