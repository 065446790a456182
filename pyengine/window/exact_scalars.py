"""Sums of a few scalars that do not depend on their order, grouping or the number of ranks.

A float64 is cut at fixed places into pieces of 40 bits. Each piece is a small whole number of its own lane,
so up to 2^13 of them add without rounding, in float64 and in any order; the lanes are put together once, on
the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.ops.device import send

_BITS = 40
# From the largest float32 down to its smallest denormal. Beyond the top the first lane only grows.
_UNITS = [2.0**exponent for exponent in range(88, -153, -_BITS)]
NUM_LANES = len(_UNITS)
ROUNDED_LANE = 2  # of `rounded`; its unit is nothing special


def lanes(values: Tensor) -> Tensor:
    """Return the sum of `values` as lanes that may be added to those of other sums.

    Args:
        values: float64 `[n]`; float32 numbers keep every bit, of others those above 2^-152 count.

    Returns:
        float64 `[NUM_LANES]`, whole numbers; exact for up to 8192 values in all sums that are added.

    Example:
        >>> from_one_rank, from_another = lanes(torch.tensor([1e8, 1.0])), lanes(torch.tensor([-1e8]))
        >>> total((from_one_rank + from_another).tolist())
        1.0
    """
    units = send(_UNITS, torch.float64, values.device)
    pieces = (values.double()[:, None] / units).trunc()
    pieces[:, 1:] -= pieces[:, :-1] * 2.0**_BITS
    return pieces.sum(0)


def rounded(value: Tensor) -> Tensor:
    """Return what a sum is in lane `ROUNDED_LANE`, the others at 0; not exact: where it has been rounded
    already, or float64 has float32's range.

    Args:
        value: float64 0-dim.
    """
    return value / _UNITS[ROUNDED_LANE]


def total(summed: Sequence[float]) -> float:
    """Return the sum that summed lanes hold, rounded once; inf or nan if one of the values was."""
    if not math.isfinite(summed[0]):
        return summed[0]
    return math.fsum(lane * unit for lane, unit in zip(summed, _UNITS, strict=True))
