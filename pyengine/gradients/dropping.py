"""Drop micro-batches with inf or nan before they are accumulated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyengine.gradients.base import Reducer
from pyengine.gradients.published import Published
from pyengine.ops.device import is_lazy, runs_ahead


class Dropping:
    """Checks a micro-batch, and drops it if it is not finite.

    `.grad` of the reducer's `grad_holders` holds only the current micro-batch's gradient until `collect`.

    Cost: a read of every gradient of a micro-batch; on an accelerator, where the host does not wait for the
    result, another read and a write.
    """

    def __init__(self, reducer: Reducer, published: Published) -> None:
        self._names, self._device = reducer.names, reducer.params[0].device
        self._reducer, self._published = reducer, published
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
        holders = self._reducer.grad_holders()
        if holders is self._reducer.params and not is_lazy(self._device):
            return self._published.flags()
        none = torch.zeros((), dtype=torch.bool, device=self._device)
        grads = [None if one is None else one.grad for one in holders]
        lost = [none if grad is None else ~torch.isfinite(grad).all() for grad in grads]
        return torch.stack(lost).to(torch.uint8)


def _zeroed_if(grad: Tensor, bad: Tensor) -> Tensor:
    """Return a gradient, or zeros if `bad`, in the same layout."""
    if grad.layout is torch.strided:
        return torch.where(bad, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
    whole = grad.coalesce()
    values = _zeroed_if(whole.values(), bad)
    return torch.sparse_coo_tensor(
        whole.indices(), values, whole.shape, device=values.device, is_coalesced=True
    )
