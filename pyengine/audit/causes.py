"""From numbers that differ to the likely cause: an ordered table, the first row that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Of a number that follows from others up to rounding.
_FITS = 2**-6


@dataclass(frozen=True)
class SubjectEvidence:
    """What one rank knows of one subject.

    Attributes:
        bits: checksums of parameter, gradient and optimizer state; None where there is none.
        came: of the sampled elements, the gradients of this rank's micro-batches; float64 `[n]`.
        last: the same of the last one alone.
        left: of the same elements, the reduced gradient, with all that is pending; 0 for those on
            other ranks.
        count: what its micro-batches counted; 0 if that is not known.
        arrivals: gradients that came.
        is_whole: whether this rank holds the whole gradient.
    """

    bits: tuple[int | None, int | None, int | None]
    came: Tensor
    last: Tensor
    left: Tensor
    count: float
    arrivals: int
    is_whole: bool


class Case:
    """The evidence of all ranks over which one gradient is summed.

    Args:
        by_rank: who knows what.
        factor: what the sum of all that came is to be multiplied by.

    Attributes:
        all: the evidence, without ranks.
        world: ranks.
        factor: as given.
        came, last: by rank, float64 `[ranks, n]`.
        left: the reduced gradient as each rank has it, the same shape.
        due: what it has to be, `[n]`.
        due_of_last: the part of it that the last micro-batches brought.
    """

    def __init__(self, by_rank: Mapping[int, SubjectEvidence], factor: float) -> None:
        self.all, self.factor, self.world = list(by_rank.values()), factor, len(by_rank)
        self.is_whole = all(e.is_whole for e in self.all)
        self.came = torch.stack([e.came for e in self.all])
        self.last = torch.stack([e.last for e in self.all])
        left = torch.stack([e.left for e in self.all])
        self.left = left if self.is_whole else left.sum(0).expand_as(left)
        self.due, self.due_of_last = factor * self.came.sum(0), factor * self.last.sum(0)
        self._noise = _FITS * float((factor * self.came.abs().sum(0)).norm())

    @property
    def is_told_by_last(self) -> bool:
        """Whether more than one micro-batch came, so that the last one is not all."""
        return any(e.arrivals > 1 for e in self.all)

    @property
    def is_told_by_rank(self) -> bool:
        """Whether ranks hold whole gradients, and different ones came to them."""
        own = self.came - self.came.mean(0)
        return self.is_whole and self.factor * float(own.norm()) > 4 * self._noise

    @property
    def shares(self) -> tuple[float, ...]:
        """Return what a rank's own part may have been multiplied by."""
        return 1.0, self.factor, self.factor * self.world, 1 / self.world

    def fits(self, wanted: Tensor) -> bool:
        """Whether every rank has what is wanted of it, `[ranks, n]` or `[n]`."""
        return float((self.left - wanted).norm(dim=1).max()) <= self._noise

    def ratios(self) -> tuple[list[float], bool]:
        """Return by what each rank's gradient is off, and whether that is all: it points where it should."""
        size = float(self.due @ self.due)
        if size**0.5 <= 2 * self._noise:
            return [], False
        found = [float(row @ self.due) / size for row in self.left]
        shares = torch.tensor(found, dtype=torch.float64, device=self.due.device)
        rest = self.left - shares.unsqueeze(1) * self.due
        return found, float(rest.norm(dim=1).max()) <= self._noise * max(1e-3, *map(abs, found))


def _holds_its_own(case: Case) -> bool:
    return case.is_told_by_rank and any(case.fits(share * case.came) for share in case.shares)


def _only_last_reduced(case: Case) -> bool:
    own = case.came - case.last
    parts = [share * own + case.due_of_last for share in case.shares]
    return case.is_told_by_last and case.is_whole and any(map(case.fits, parts))


def _last_not_reduced(case: Case) -> bool:
    parts = [case.due - case.due_of_last + share * case.last for share in case.shares]
    return case.is_told_by_last and case.is_whole and any(map(case.fits, parts))


def _earlier_lost(case: Case) -> bool:
    return case.is_told_by_last and case.fits(case.due_of_last)


def _last_lost(case: Case) -> bool:
    return case.is_told_by_last and case.fits(case.due - case.due_of_last)


def _divided_by_own_count(case: Case) -> bool:
    counts = torch.tensor([e.count for e in case.all], dtype=torch.float64, device=case.came.device)
    if not bool((counts > 0).all()) or bool((counts == counts[0]).all()):
        return False
    return case.fits((case.came / (case.world * counts.unsqueeze(1))).sum(0))


def _nobody_has_one(case: Case) -> bool:
    return all(e.bits[1] is None for e in case.all)


def _some_have_none(case: Case) -> bool:
    return any(e.bits[1] is None for e in case.all)


NOT_REDUCED = "not reduced: every rank holds what its own micro-batches brought"
ONLY_LAST_REDUCED = "only the last micro-batch was reduced: what earlier ones left is each rank's own"
LAST_NOT_REDUCED = "the last micro-batch came behind the reduction: that part is each rank's own"
EARLIER_LOST = "only the last micro-batch is in it: earlier ones were lost"
LAST_LOST = "what the last backward brought is not in it"
MISSING = "no gradient there, and one on other ranks"
LOST = "no gradient anywhere, and micro-batches brought one"
OWN_COUNT = "each rank's part was divided by that rank's own count, not by the count of all"
SCALED_APART = "the same up to a factor, which differs by rank: clipped or scaled by other numbers"
NOT_OVER_REPLICAS = "not reduced over replicas: what each holds is of its own ranks' micro-batches"
NOT_THE_SUM = "not what the ranks' micro-batches add up to"
DIFFERS = (
    "reduced right, and not the same behind the reduction: clipped or scaled by other numbers, or written "
    "to, on some rank"
)
STATE = "gradients agree, and the optimizer's state does not: loaded or changed on some rank alone"
BITS = (
    "gradients and optimizer state agree, and it has other bits: a flipped bit, a write or a step on some "
    "rank alone"
)
BUFFER = "a buffer that ranks have to hold alike has other bits"

# In this order: what fits first is the likely cause.
REDUCTION: list[tuple[Callable[[Case], bool], str]] = [
    (_nobody_has_one, LOST),
    (_some_have_none, MISSING),
    (_holds_its_own, NOT_REDUCED),
    (_only_last_reduced, ONLY_LAST_REDUCED),
    (_last_not_reduced, LAST_NOT_REDUCED),
    (_earlier_lost, EARLIER_LOST),
    (_last_lost, LAST_LOST),
    (_divided_by_own_count, OWN_COUNT),
]


def cause_of_gradient(case: Case) -> str:
    """Return why a gradient is not what it has to be."""
    for fits, cause in REDUCTION:
        if fits(case):
            return cause
    if case.fits(case.due):
        return DIFFERS if case.is_whole else NOT_OVER_REPLICAS
    ratios, is_all = case.ratios()
    if not is_all:
        return _weighed(case) or NOT_THE_SUM
    if max(ratios) - min(ratios) > _FITS * max(map(abs, ratios)):
        return SCALED_APART
    return f"scaled by {_spelled(ratios[0])}{_meaning(ratios[0], case)}"


def _weighed(case: Case) -> str:
    """Say how often earlier micro-batches and the last one count, if that explains everything."""
    parts = torch.stack([case.due - case.due_of_last, case.due_of_last], 1)
    if not case.is_told_by_last or parts.shape[0] < 4:
        return ""
    weights = torch.linalg.lstsq(parts, case.left[0].unsqueeze(1)).solution
    if not case.fits((parts @ weights).squeeze(1)):
        return ""
    earlier, last = weights.flatten().tolist()
    return f"earlier micro-batches count {_spelled(earlier)} times, the last one {_spelled(last)} times"


def _spelled(factor: float) -> str:
    return f"{factor:.4g}" if factor >= 0.75 or factor < 0 else f"1/{1 / factor:.4g}"


def _meaning(factor: float, case: Case) -> str:
    """Report what a factor is, if it is something."""
    world, number = case.world, max(e.arrivals for e in case.all)
    known = {
        "the number of ranks": world,
        "the micro-batches of a rank": number,
        "the micro-batches of all ranks": world * number,
        "the square of the number of ranks": world**2,
    }
    found = []
    for size, sign in [(factor, ""), (1 / factor, "1 / ")]:
        found += [f"{sign}{name}" for name, value in known.items() if value > 1 and _near(size, value)]
    power = math.log2(factor) if factor > 0 else 0.5
    if abs(power) >= 1 and _near(factor, 2.0 ** round(power)):
        found.append(f"2^{round(power)}")
    return f" ({' or '.join(found)})" if found else ""


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _FITS * wanted


def odd_ranks(values: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value most others have not; none where no value is that of most."""
    counts: dict[object, list[int]] = {}
    for rank, value in values.items():
        counts.setdefault(value, []).append(rank)
    most = max(counts.values(), key=len)
    if 2 * len(most) <= len(values):
        return ()
    return tuple(sorted(rank for ranks in counts.values() if ranks is not most for rank in ranks))
