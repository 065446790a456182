"""What wires keep of an engine's gradients from one window to the next, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from pyengine.wire import Wire
from pyengine.wire.memory import WireMemory, keeps_residual


class Residuals:
    """The residuals of one or more owners of buckets.

    Args:
        owners: their memories, and in each the key of a parameter by name.
        wire: which keeps them, or none.

    Attributes:
        wire: as given.
        is_kept: whether the wire keeps any.
    """

    def __init__(self, owners: Sequence[tuple[WireMemory, Mapping[str, Hashable]]], wire: Wire) -> None:
        self.owners, self.wire = list(owners), wire
        self.is_kept = keeps_residual(wire)

    def save(self) -> dict[str, Tensor]:
        """Return copies, float32 `[numel]` in storage order each; the caller's. None of parameters that have
        none.
        """
        saved = {}
        for memory, key_of in self.owners:
            parts = memory.parts()
            saved.update({name: parts[key].clone() for name, key in key_of.items() if key in parts})
        return saved

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Overwrite all residuals, with zeros where there is none in `saved`."""
        for memory, key_of in self.owners:
            memory.load({key: saved[name] for name, key in key_of.items() if name in saved})

    def drop_if(self, is_unused: Tensor) -> None:
        """Let nothing stay of a window that has landed, if it must not be used: 0-dim, not 0."""
        for memory, _ in self.owners:
            memory.drop(is_unused)

    def scale_(self, factor: Tensor) -> None:
        """Multiply all by `factor`, 0-dim: by what gradients grow from now on."""
        for memory, _ in self.owners:
            memory.scale_(factor)
