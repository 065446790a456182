"""Sums of a few scalars that do not depend on their order, grouping or the number of ranks.

A float64 is cut at fixed places into pieces of 40 bits. Each piece is a small whole number of its own lane,
so up to 2^13 of them add without rounding, in float64 and in any order; the lanes are put together once, on
the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

import torch
from torch import Tensor

from pyengine.ops.device import send

_BITS = 40
# From the largest float32 down to its smallest denormal. Beyond the top the first lane only grows.
_UNITS = [2.0**exponent for exponent in range(88, -153, -_BITS)]
NUM_LANES = len(_UNITS)
ROUNDED_LANE = 2  # of `rounded`; its unit is nothing special


def lanes(values: Tensor) -> Tensor:
    """Return the sum of float64 `[n]` as lanes that add to those of other sums: whole numbers, `[NUM_LANES]`.

    float32 numbers keep every bit, of others those above 2^-152 count. Exact for 8192 values in all.

    Example:
        >>> from_one_rank, from_another = lanes(torch.tensor([1e8, 1.0])), lanes(torch.tensor([-1e8]))
        >>> total((from_one_rank + from_another).tolist())
        1.0
    """
    units = send(_UNITS, torch.float64, values.device)
    pieces = (values.double()[:, None] / units).trunc()
    pieces[:, 1:] -= pieces[:, :-1] * 2.0**_BITS
    return pieces.sum(0)


def lanes_of(values: Iterable[float]) -> list[float]:
    """Return the same of numbers that the host knows; inf and nan show in the first lane."""
    summed = [0.0] * NUM_LANES
    for value in values:
        if not math.isfinite(value):
            summed[0] += value
            continue
        for lane, unit in enumerate(_UNITS):
            _, piece = math.modf(value / unit)
            summed[lane] += piece
            value -= piece * unit
    return summed


def rounded(value: Tensor) -> Tensor:
    """Return a sum that has been rounded already, float64 0-dim, as its value in lane `ROUNDED_LANE`."""
    return value / _UNITS[ROUNDED_LANE]


def total(summed: Sequence[float]) -> float:
    """Return the sum that summed lanes hold, rounded once; inf or nan if one of the values was."""
    if not math.isfinite(summed[0]):
        return summed[0]
    return math.fsum(map(mul, summed, _UNITS))
