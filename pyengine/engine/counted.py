"""The part of `Sync` that knows a window's counts before its first forward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyengine.engine.counting import weigh
from pyengine.engine.has_engine import HasEngine


class Counted(HasEngine):
    """What `windows(loader, count=...)` has read ahead."""

    @property
    def totals(self) -> dict[str, float]:
        """What the window counts over all its ranks and micro-batches, by loss, from before its first
        forward on; under "count" if the function gives numbers. Empty where nothing was read ahead.
        """
        known = self._engine.current.denominators
        return {} if known is None else dict(known.totals)

    def weigh(self, losses: Mapping[str, Tensor | float]) -> Tensor:
        """Return the one loss that `backward` makes of several: the sum of loss × divisor / its own total.

        Args:
            losses: as for `backward`.

        Returns:
            0-dim, to run a backward on inside a micro-batch's own block; do not give it to `backward`
            together with a dict.

        Raises:
            RuntimeError: the window's counts were not read ahead.
            ValueError: the losses are not those that are counted.
        """
        return weigh(self._engine, losses)
