"""The ranks over which each gradient is summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.comm.base import Comm


@dataclass(frozen=True)
class Groups:
    """The transports of one engine.

    Attributes:
        everybody: over all ranks of the engine.
        comms: over the ranks of each group, by `ParamSpec.group`. Their traffic counts as traffic of
            `everybody`.
        counted: by parameter, whether this rank counts it in the norm; None: all ranks hold the same
            parameters.
        are_alike: whether all ranks have parameters of the same names in the same groups, so that they can
            agree on one order of buckets.
    """

    everybody: Comm
    comms: Sequence[Comm]
    counted: Sequence[bool] | None = None
    are_alike: bool = True
