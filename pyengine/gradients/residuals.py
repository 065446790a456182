"""The residuals that wires keep between windows, by parameter name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from pyengine.wire import Wire
from pyengine.wire.bucket_wire import WireMemory


class Residuals:
    """The residuals of one or more owners of buckets.

    Args:
        owners: the `WireMemory` of each owner, and in it the key of each parameter by name.
        wire: over which the owners' buckets are reduced.

    Attributes:
        wire: as given.
        is_kept: whether the wire keeps residuals.
    """

    def __init__(self, owners: Sequence[tuple[WireMemory, Mapping[str, Hashable]]], wire: Wire) -> None:
        self.owners, self.wire = list(owners), wire
        self.is_kept = wire.keeps_residual

    def save(self) -> dict[str, Tensor]:
        """Return copies of the residuals, without parameters that have none.

        Returns:
            By name, float32 `[numel]` in storage order; owned by the caller.
        """
        saved = {}
        for memory, key_of in self.owners:
            parts = memory.parts()
            saved.update({name: parts[key].clone() for name, key in key_of.items() if key in parts})
        return saved

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Overwrite all residuals, with zeros where `saved` has none."""
        for memory, key_of in self.owners:
            memory.load({key: saved[name] for name, key in key_of.items() if name in saved})

    def drop_if(self, is_unused: Tensor) -> None:
        """Zero the last window's residuals if it must not be used.

        Args:
            is_unused: 0-dim; not 0 if the window must not be used.
        """
        for memory, _ in self.owners:
            memory.drop(is_unused)

    def scale_(self, factor: Tensor) -> None:
        """Multiply all residuals by `factor`, 0-dim.

        It is the factor by which gradients grow from now on.
        """
        for memory, _ in self.owners:
            memory.scale_(factor)
