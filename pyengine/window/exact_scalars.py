"""Sums of a few scalars, independent of the order, the grouping and the number of ranks.

A float64 is split at fixed bit positions into 40-bit integers. Each integer is stored in a separate element
(lane), so up to 2^13 integers can be added in float64 without rounding and in any order. In the end, the host
combines the lanes into one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

import torch
from torch import Tensor

from pyengine.ops.device import send

_BITS = 40
# The unit of each lane, from the largest float32 down to the smallest denormal. Values above the largest
# float32 only enlarge the first lane.
_UNITS = [2.0**exponent for exponent in range(88, -153, -_BITS)]
NUM_LANES = len(_UNITS)
ROUNDED_LANE = 2  # `rounded` uses this lane, but any lane would do


def lanes(values: Tensor) -> Tensor:
    """Return the sum of `values` (float64 `[n]`) as `NUM_LANES` integers, which can be added to other lanes.

    Every bit of float32 values is kept; bits of other values below 2^-152 are dropped. The sum is exact for
    up to 8192 values in total.

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
    """Return the lanes of a sum of numbers on the host; inf and nan are added to the first lane."""
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
    """Return the value of lane `ROUNDED_LANE` for a sum that is already rounded (0-dim float64)."""
    return value / _UNITS[ROUNDED_LANE]


def total(summed: Sequence[float]) -> float:
    """Return the number that summed lanes represent, rounded once; inf or nan if any value was nonfinite."""
    if not math.isfinite(summed[0]):
        return summed[0]
    return math.fsum(map(mul, summed, _UNITS))
