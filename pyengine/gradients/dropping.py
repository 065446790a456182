"""Drop micro-batches with inf or nan before they are accumulated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import by_dtype
from pyengine.gradients.base import Reducer
from pyengine.gradients.published import norms_of
from pyengine.gradients.slots import slot_gradient
from pyengine.ops.device import is_lazy, runs_ahead


class Dropping:
    """Checks a micro-batch, and drops it if it is not finite.

    `.grad` of the reducer's `grad_holders` holds only the current micro-batch's gradient until `collect`.

    Cost: a read of every gradient of a micro-batch; on an accelerator, where the host does not wait for the
    result, another read and a write.
    """

    def __init__(self, reducer: Reducer) -> None:
        params = reducer.params
        self._names, self._params = reducer.names, params
        self._reducer = reducer
        self._device = params[0].device
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        # By dtype, the parameters whose gradients are read in fused calls.
        self._groups: list[list[Parameter]] = []
        if reducer.grad_holders() is params and not is_lazy(self._device):
            self._groups = by_dtype(params)
            index = {id(param): place for place, param in enumerate(params)}
            self._norms = norms_of(self._groups, index, self._device)
        self.begin()

    def begin(self) -> None:
        self._flags: dict[int, Tensor] = {}
        self._bad_losses: dict[int, Tensor] = {}

    @torch.no_grad()
    def check(self, index: int, loss: Tensor | None) -> bool | Tensor:
        """Drop a micro-batch unless its gradients and 0-dim loss are finite; return whether it is dropped.

        The result is a bool, or a 0-dim tensor where the host runs ahead of the device. `index` is that of
        the micro-batch among this rank's in the window.
        """
        flags = self._flags[index] = self._nonfinite_flags()
        bad = flags.bool().any()
        if loss is not None:
            lost = ~torch.isfinite(loss.detach().to(self._device))
            self._bad_losses[index] = lost
            bad = bad | lost.reshape(())
        if runs_ahead(self._device) or is_lazy(self._device):
            for one in self._reducer.grad_holders():
                if one is not None and one.grad is not None:
                    one.grad = _zeroed_if(one.grad, bad)
            return bad
        if is_bad := bool(bad):
            for one in self._reducer.grad_holders():
                if one is not None:
                    one.grad = None
        return is_bad

    def reports(self) -> Callable[[], dict[int, list[str]]]:
        """Return a function that returns, by dropped micro-batch of this window, what was not finite.

        It outlives the window. Calling it waits for the device.
        """
        names, flagged, losses = self._names, self._flags, self._bad_losses

        def report() -> dict[int, list[str]]:
            found = {}
            for index, flags in flagged.items():
                what = ["its loss"] if index in losses and bool(losses[index]) else []
                what += [f"the gradient of {names[place]!r}" for place in flags.nonzero().flatten().tolist()]
                if what:
                    found[index] = what
            return found

        return report

    def _nonfinite_flags(self) -> Tensor:
        if not self._groups:
            none = torch.zeros((), dtype=torch.bool, device=self._device)
            grads = [None if one is None else one.grad for one in self._reducer.grad_holders()]
            lost = [none if grad is None else ~torch.isfinite(grad).all() for grad in grads]
            return torch.stack(lost).to(torch.uint8)
        flags = torch.zeros(len(self._params), dtype=torch.uint8, device=self._device)
        self._norms.begin()
        for place, group in enumerate(self._groups):
            self._norms.read(place, [slot_gradient(param) for param in group], None, self._one)
        self._norms.copy_flags_to(flags)
        return flags


def _zeroed_if(grad: Tensor, bad: Tensor) -> Tensor:
    """Return a gradient, or zeros if `bad`, in the same layout."""
    if grad.layout is torch.strided:
        return torch.where(bad, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
    whole = grad.coalesce()
    values = _zeroed_if(whole.values(), bad)
    return torch.sparse_coo_tensor(
        whole.indices(), values, whole.shape, device=values.device, is_coalesced=True
    )
