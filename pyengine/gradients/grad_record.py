"""What gradients were at the end of a micro-batch, and which others have written to or replaced since."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter

from pyengine.gradients.grad_versions import GradVersions


class GradRecord:
    """A record of the gradients that an owner accumulates; indices are those of its parameters."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._versions = GradVersions(params)

    def record(self) -> None:
        """Record the gradients at the end of a micro-batch, and clear the list that `outside` returns."""
        self._versions.record()

    def changed(self) -> list[int]:
        """Return the indices of gradients written to or replaced since `record`.

        Where gradients share a version, those that may have been written to.
        """
        return self._versions.changed()

    def replaced(self) -> list[int]:
        """Return the indices of gradients that others have replaced between micro-batches of this window,
        where `changed` has not shown it.
        """
        return []

    def follow_replaced(self) -> None:
        """Note that the backwards of this micro-batch may have replaced gradients: with create_graph=True."""

    def outside(self) -> Sequence[int]:
        """Return the indices of gradients written elsewhere than to `.grad` since `clear_outside`."""
        return ()

    def clear_outside(self) -> None:
        """Clear the list that `outside` returns."""
