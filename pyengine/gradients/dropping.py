"""Drop micro-batches with inf or nan before they are accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import by_dtype
from pyengine.gradients.base import Reducer
from pyengine.gradients.bucket import packed
from pyengine.gradients.norms import SlotNorms
from pyengine.gradients.slots import slot_gradient
from pyengine.ops.device import is_lazy, runs_ahead


class Dropping:
    """Checks a micro-batch, and drops it if it is not finite.

    Args:
        reducer: owns the gradients; `.grad` of its `grad_holders` holds only the current micro-batch's
            gradient until `collect`.

    Cost: a read of every gradient of a micro-batch; on an accelerator, where the host does not wait for the
    result, another read and a write.
    """

    def __init__(self, reducer: Reducer) -> None:
        params = reducer.params
        self._names, self._params = reducer.names, params
        self._reducer = reducer
        has_own_holders = reducer.grad_holders() is not None
        self._device = params[0].device
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        index = {param: place for place, param in enumerate(params)}
        self._norms: list[tuple[list[Parameter], SlotNorms]] = []
        if not has_own_holders and not is_lazy(self._device):
            for group in map(list, by_dtype(params)):
                plan = packed([param.numel() for param in group])
                self._norms.append((group, SlotNorms(plan, [index[p] for p in group], self._device)))
        self.begin()

    def begin(self) -> None:
        """Start a window."""
        self._flags: dict[int, Tensor] = {}
        self._bad_losses: dict[int, Tensor] = {}

    @torch.no_grad()
    def check(self, index: int, loss: Tensor | None) -> bool | Tensor:
        """Drop a micro-batch unless its gradients and loss are finite.

        Args:
            index: of the micro-batch, among this rank's in the window.
            loss: 0-dim; None where the caller gave none.

        Returns:
            Whether the micro-batch is dropped: a bool; a 0-dim tensor where the host runs ahead of the
                device.
        """
        flags = self._flags[index] = self._nonfinite_flags()
        bad = flags.any()
        if loss is not None:
            lost = ~torch.isfinite(loss.detach().to(self._device))
            self._bad_losses[index] = lost
            bad = bad | lost.reshape(())
        if runs_ahead(self._device) or is_lazy(self._device):
            for one in self._present_holders():
                if one.grad is not None:
                    one.grad = _zeroed_if(one.grad, bad)
            return bad
        if is_bad := bool(bad):
            for one in self._present_holders():
                one.grad = None
        return is_bad

    def reports(self) -> Callable[[], dict[int, list[str]]]:
        """Return a function that describes the dropped micro-batches of this window.

        Returns:
            A function that returns, by micro-batch, what was not finite. It outlives the window. Calling it
                waits for the device.
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
        """Return which gradients are not finite, uint8 `[params]`."""
        if not self._norms:
            none = torch.zeros((), dtype=torch.bool, device=self._device)
            grads = [None if one is None else one.grad for one in self._grad_holders()]
            lost = [none if grad is None else ~torch.isfinite(grad).all() for grad in grads]
            return torch.stack(lost).to(torch.uint8)
        flags = torch.zeros(len(self._params), dtype=torch.uint8, device=self._device)
        for group, norms in self._norms:
            flags.index_copy_(0, norms.params, norms.flags([slot_gradient(p) for p in group], self._one))
        return flags

    def _grad_holders(self) -> Sequence[Any]:
        """Return by parameter the tensor with the micro-batch's gradient, or None."""
        holders = self._reducer.grad_holders()
        return self._params if holders is None else holders

    def _present_holders(self) -> list[Any]:
        return [one for one in self._grad_holders() if one is not None]


def _zeroed_if(grad: Tensor, bad: Tensor) -> Tensor:
    """Return a gradient, or zeros if `bad`, in the same layout."""
    if grad.layout is torch.strided:
        return torch.where(bad, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
    whole = grad.coalesce()
    values = _zeroed_if(whole.values(), bad)
    return torch.sparse_coo_tensor(
        whole.indices(), values, whole.shape, device=values.device, is_coalesced=True
    )
