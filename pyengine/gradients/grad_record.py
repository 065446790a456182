"""Record of gradients at the end of a micro-batch, to detect writes by code outside the engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter

from pyengine.gradients.grad_versions import GradVersions


class GradRecord:
    """A record of the accumulated gradients; indices refer to the parameters of the gradient owner."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._versions = GradVersions(params)

    def record(self) -> None:
        """Record the gradients at the end of a micro-batch, and clear the list that `outside` returns."""
        self._versions.record()

    def changed(self) -> list[int]:
        """Return the indices of gradients that have been written to or replaced since `record`.

        If several gradients share a version counter, the result includes all gradients that may have been
        written to.
        """
        return self._versions.changed()

    def replaced(self) -> list[int]:
        """Return the indices of gradients replaced between the micro-batches of this window.

        The result includes only gradients that were replaced by code outside the engine, and only if
        `changed` may miss them.
        """
        return []

    def follow_replaced(self) -> None:
        """Accept gradients that this micro-batch's backwards have replaced because of create_graph=True."""

    def outside(self) -> Sequence[int]:
        """Return the indices of gradients that have been written outside of `.grad` since `clear_outside`."""
        return ()

    def clear_outside(self) -> None:
        """Clear the list of gradients that `outside` returns."""
