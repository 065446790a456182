"""Find the likely cause of a difference between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The relative tolerance in comparisons of numbers that are equal up to rounding.
_FITS = 2**-6


@dataclass(frozen=True)
class SubjectEvidence:
    """The observations of one rank about one audited tensor (subject)."""

    differs: set[str]  # What differs between ranks: "parameter", "gradient", "optimizer state".
    kind: str  # "parameter" or "buffer".
    factor: float  # Expected factor from the sum over ranks to the reduced gradient.
    bits: Sequence[int | None]  # Checksums of parameter, gradient and optimizer state.
    came: Tensor  # float64 [n], sampled elements of the gradients of this rank's micro-batches.
    last: Tensor  # The same elements for the last micro-batch alone.
    left: Tensor  # The same elements of the reduced gradient; 0 for elements on other ranks.
    count: float  # Number of items in this rank's micro-batches; 0 if not known.
    arrivals: int  # Number of gradients that arrived.
    is_whole: bool  # Whether this rank has the whole gradient.


class Case:
    """The observations of all ranks about one gradient that is summed over these ranks."""

    def __init__(self, evidence: Sequence[SubjectEvidence]) -> None:
        self.all, self.world = evidence, len(evidence)
        self.factor = factor = evidence[0].factor
        self.is_whole = all(e.is_whole for e in self.all)
        # Samples by rank, float64 [ranks, n].
        self.came = torch.stack([e.came for e in self.all])
        self.last = torch.stack([e.last for e in self.all])
        left = torch.stack([e.left for e in self.all])
        self.left = left if self.is_whole else left.sum(0).expand_as(left)
        # The expected reduced gradient, of shape [n], and its part that comes from the last micro-batches.
        self.due, self.due_of_last = factor * self.came.sum(0), factor * self.last.sum(0)
        self._noise = _FITS * float((factor * self.came.abs().sum(0)).norm())

        self.has_earlier = any(e.arrivals > 1 for e in self.all)  # Whether there were earlier micro-batches.
        # Whether ranks have whole gradients and had different local gradients.
        own = self.came - self.came.mean(0)
        self.is_different_by_rank = self.is_whole and factor * float(own.norm()) > 4 * self._noise

    def fits(self, wanted: Tensor) -> bool:
        """Whether the gradient of every rank matches `wanted`, `[ranks, n]` or `[n]`, up to rounding."""
        return float((self.left - wanted).norm(dim=1).max()) <= self._noise

    def ratios(self) -> tuple[list[float], bool]:
        """Return the ratios of ranks' gradients to the expected gradient, and whether directions agree."""
        size = float(self.due @ self.due)
        if size**0.5 <= 2 * self._noise:
            return [], False
        found = [float(row @ self.due) / size for row in self.left]
        shares = torch.tensor(found, dtype=torch.float64, device=self.due.device)
        rest = self.left - shares.unsqueeze(1) * self.due
        return found, float(rest.norm(dim=1).max()) <= self._noise * max(1e-3, *map(abs, found))


def cause_of_gradient(evidence: Sequence[SubjectEvidence]) -> str:
    """Return the first cause that explains why a gradient is wrong, from the observations of all ranks."""
    case = Case(evidence)
    if all(e.bits[1] is None for e in case.all):
        return "missing on every rank, although micro-batches computed it"
    if any(e.bits[1] is None for e in case.all):
        return "missing there, although other ranks have it"
    # Possible factors of a rank's own part.
    shares = (1.0, case.factor, case.factor * case.world, 1 / case.world)
    if case.is_different_by_rank and any(case.fits(share * case.came) for share in shares):
        return "not reduced: every rank has only the gradient of its own micro-batches"
    if case.has_earlier:
        earlier, due_of_earlier = case.came - case.last, case.due - case.due_of_last
        if case.is_whole and any(case.fits(share * earlier + case.due_of_last) for share in shares):
            return "only the last micro-batch was reduced, and earlier micro-batches were not"
        if case.is_whole and any(case.fits(due_of_earlier + share * case.last) for share in shares):
            return "the last micro-batch came after the reduction, so its part was not reduced"
        if case.fits(case.due_of_last):
            return "contains only the last micro-batch: earlier micro-batches were lost"
        if case.fits(due_of_earlier):
            return "does not contain the gradient of the last backward"
    counts = torch.tensor([e.count for e in case.all], dtype=torch.float64, device=case.came.device)
    are_unequal = bool((counts > 0).all()) and not bool((counts == counts[0]).all())
    if are_unequal and case.fits((case.came / (case.world * counts.unsqueeze(1))).sum(0)):
        return "each rank's part was divided by that rank's own count, not by the count of all ranks"
    if case.fits(case.due):
        return (
            "reduced correctly, but no longer equal after the reduction: clipped or scaled by a different "
            "factor, or written to, on some rank"
            if case.is_whole
            else "not reduced over replicas: each replica has the gradient of its own micro-batches only"
        )
    ratios, is_all = case.ratios()
    if not is_all:
        return _weighed(case) or "not the sum over the ranks' micro-batches"
    if max(ratios) - min(ratios) > _FITS * max(map(abs, ratios)):
        return "equal up to a factor that differs between ranks: clipped or scaled differently"
    return f"scaled by {_spelled(ratios[0])}{_meaning(ratios[0], case)}"


def _weighed(case: Case) -> str:
    """Describe the weights of earlier and last micro-batches; empty if no weights fit the gradient."""
    parts = torch.stack([case.due - case.due_of_last, case.due_of_last], 1)
    if not case.has_earlier or parts.shape[0] < 4:
        return ""
    weights = torch.linalg.lstsq(parts, case.left[0].unsqueeze(1)).solution
    if not case.fits((parts @ weights).squeeze(1)):
        return ""
    earlier, last = weights.flatten().tolist()
    return f"earlier micro-batches have weight {_spelled(earlier)}, the last one has weight {_spelled(last)}"


def _spelled(factor: float) -> str:
    return f"{factor:.4g}" if factor >= 0.75 or factor < 0 else f"1/{1 / factor:.4g}"


def _meaning(factor: float, case: Case) -> str:
    """Describe the meaning of a factor, or return an empty string if none is known."""
    world, number = case.world, max(e.arrivals for e in case.all)
    known = {
        "the number of ranks": world,
        "the number of micro-batches per rank": number,
        "the number of micro-batches of all ranks": world * number,
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
    """Return the ranks whose value differs from the majority, or no ranks if there is no majority."""
    counts: dict[object, list[int]] = {}
    for rank, value in values.items():
        counts.setdefault(value, []).append(rank)
    most = max(counts.values(), key=len)
    if 2 * len(most) <= len(values):
        return ()
    return tuple(sorted(rank for ranks in counts.values() if ranks is not most for rank in ranks))
