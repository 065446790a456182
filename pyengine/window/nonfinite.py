"""The sources of inf and nan in a failed window, gathered from all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_NAMED = 5


@dataclass(frozen=True)
class RankFindings:
    """What one rank knows about a failed window."""

    gave_up: str  # The exception in this rank's last backward; empty if there was none.
    losses: list[int]  # Micro-batches whose loss was inf or nan.
    # For each parameter with a nonfinite reduced gradient, by name: the micro-batches in which the gradient
    # of this rank was nonfinite; None if micro-batches were not checked.
    blamed: dict[str, list[int] | None]
    refusals: Sequence[str] = ()  # errors of this rank, found after the header


def is_not_finite(norms: Tensor) -> Tensor:
    """Return which norms or sums of squares are inf or nan."""
    # One comparison suffices, because norms cannot be -inf. On a lazy device `isfinite` takes four
    # operations.
    return ~(norms < math.inf)


def describe(findings: Sequence[RankFindings], *, is_exact: bool = False) -> str:
    """Describe which parameters had nonfinite gradients and where they came from.

    The text names no parameter if only the mean is nonfinite.
    """
    names = list(dict.fromkeys(name for f in findings for name in f.blamed))
    quitters = [
        f"rank {rank} gave up the window: {f.gave_up}" for rank, f in enumerate(findings) if f.gave_up
    ]
    if quitters:
        return "; ".join(quitters)
    if not names:
        return (
            "finite sums leave the range of the gradients' dtype when they are multiplied by 1/count or the "
            "inverse loss scale, or when kept gradients are added; count must be the number of items that "
            "the losses were summed over"
        )
    sources = [
        f"rank {rank}, micro-batch {index} (its loss)"
        for rank, f in enumerate(findings)
        for index in f.losses
    ]
    blamed = set()
    for rank, f in enumerate(findings):
        known = {index for places in f.blamed.values() for index in places or []}
        blamed |= {f"rank {rank}, micro-batch {index}" for index in known - set(f.losses)}
    sources += sorted(blamed)
    limit = "; or from a finite value of 2**126 (8.5e37) or more, which accumulator='exact' cannot represent"
    origin = _origin(sources, findings) + limit * is_exact
    return f"inf or nan in the gradient of {listed([repr(name) for name in names])}, from {origin}"


def listed(what: Sequence[str]) -> str:
    """Join the first `MAX_NAMED` texts, and append the number of remaining texts."""
    more = f" and {len(what) - MAX_NAMED} more" if len(what) > MAX_NAMED else ""
    return ", ".join(what[:MAX_NAMED]) + more


def _origin(sources: list[str], findings: Sequence[RankFindings]) -> str:
    if sources:
        return "; ".join(sources[:MAX_NAMED])
    if any(None in f.blamed.values() for f in findings):
        return (
            "a backward whose loss was finite, or from the sum over ranks; nonfinite='raise' checks every "
            "micro-batch and names the one with inf or nan"
        )
    return "the sum: every rank's own gradients were finite"


def flagged_in(flagged: Sequence[Tensor], slot: int) -> list[int]:
    """Return the micro-batches in which the gradient of a slot was nonfinite; waits for the device."""
    return [index for index, flags in enumerate(flagged) if flags[slot]]
