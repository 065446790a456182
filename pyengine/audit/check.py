"""One check: a short vector of each rank and group, and what all ranks conclude from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.audit.causes import (
    BITS,
    BUFFER,
    STATE,
    Case,
    SubjectEvidence,
    cause_of_gradient,
    odd_ranks,
)
from pyengine.audit.checksum import differ, pieces
from pyengine.audit.finding import Finding
from pyengine.audit.hyperparameters import Numbers, difference
from pyengine.audit.subject import Subject
from pyengine.comm.base import Comm
from pyengine.ops.device import HOST, Readback

_PARAMETER, _GRADIENT, _STATE = range(3)
_KINDS = ("parameter", "gradient", "optimizer state")
_MOST = 32  # subjects whose evidence is gathered
_PROBES = 3  # sums over samples: one alone may be right by chance
_HEAD = 7  # count, void, claimed count, and the pieces of the hyperparameters


@dataclass(frozen=True)
class Local:
    """What one rank found in one window.

    Attributes:
        step: the window.
        since: the window behind the last clean check.
        bits: int64 `[subjects, 3]`, checksums of parameter, gradient and optimizer state.
        has: which of them there are.
        came, last, left: float64 `[subjects, n]`, of the elements that were looked at: see `SubjectEvidence`.
            `left` is this rank's share.
        arrivals: by subject.
        counts: by subject, what this rank's micro-batches counted, float64 `[subjects]`; 0: the gradient is a
            mean over ranks.
        count: of all of them, where `claimed` is known.
        claimed: what the reduced gradient was divided by; nan: not known.
        void: float64 0-dim; more than 0: this window's gradients are not used, and are not compared.
        hyper: int64 0-dim.
        numbers: what that is a digest of.
        is_strict: whether the factor is known; else any that is common to all gradients will do.
    """

    step: int
    since: int
    bits: Tensor
    has: Sequence[tuple[bool, bool, bool]]
    came: Tensor
    last: Tensor
    left: Tensor
    arrivals: Sequence[int]
    counts: Tensor
    count: Tensor
    claimed: Tensor
    void: Tensor
    hyper: Tensor
    numbers: Numbers
    is_strict: bool


class Check:
    """The check of one window, under way.

    Args:
        subjects: what is compared.
        comms: transports of the groups; the first is of all ranks of the audit.
        local: this rank's part.
        tolerance: how far a reduced gradient may be off, relative to what came.
        is_one_group: whether no rank has a group but that of all.

    Attributes:
        step: the window.

    Cost: one all-reduce a group, of 160 bytes a subject and 56 more; where there are several groups, one of 8
    bytes behind them, waited for.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        comms: Sequence[Comm],
        local: Local,
        tolerance: float,
        *,
        is_one_group: bool,
    ) -> None:
        self._is_one_group = is_one_group
        self._subjects, self._comms, self._local, self._tolerance = subjects, comms, local, tolerance
        self.step, self._total, self._void = local.step, 0.0, 0.0
        self._factors: dict[int, float] = {}
        self._vectors = [self._pack(group) for group in range(len(comms))]
        works = [comm.all_reduce(vector) for comm, vector in zip(comms, self._vectors, strict=True)]
        for work in works:
            work.wait()
        self._numbers = [Readback(vector) for vector in self._vectors]

    def conclude(self) -> list[Finding]:
        """Wait for the numbers, and return what all ranks find together: the same everywhere.

        Cost: nothing but the wait where all is well; else a gather of what each rank knows.
        """
        suspects, is_bad = self._suspects()
        if not self._is_one_group:
            flag = torch.tensor([is_bad], dtype=torch.float32, device=self._local.bits.device)
            self._comms[0].all_reduce(flag).wait()
            is_bad = bool(flag > 0)
        return self._explain(suspects) if is_bad else []

    def _pack(self, group: int) -> Tensor:
        """Return this rank's part for one group."""
        local = self._local
        head = torch.zeros(_HEAD, dtype=torch.float64, device=local.bits.device)
        if group == 0:
            head[0], head[1] = local.count, local.void
            head[2] = torch.nan_to_num(local.claimed, nan=0.0)
            head[3:] = pieces(local.hyper.reshape(1))[0]
        same = self._indices("replicas", group)
        summed = self._indices("summed", group)
        weights = _weights(local.came)
        scale = local.came.abs().sum(1, keepdim=True)
        parts = [local.came @ weights, local.left @ weights, scale, local.counts.unsqueeze(1)]
        probed = torch.cat(parts, 1)[summed]
        return torch.cat([head, pieces(local.bits[same].reshape(-1)).reshape(-1), probed.reshape(-1)])

    def _indices(self, which: str, group: int) -> list[int]:
        return [i for i, subject in enumerate(self._subjects) if getattr(subject, which) == group]

    def _suspects(self) -> tuple[dict[int, set[str]], bool]:
        """Return what is wrong, by subject (-1: hyperparameters, -2: the count), and whether anything is."""
        found: dict[int, set[str]] = {}
        read = [torch.tensor(numbers.get(), dtype=torch.float64, device=HOST) for numbers in self._numbers]
        total, void = float(read[0][0]), float(read[0][1])
        self._total, self._void = total, void
        if bool(differ(read[0][3:_HEAD].reshape(1, 4), self._comms[0].world_size)):
            found.setdefault(-1, set()).add("hyperparameters")
        claimed = float(self._local.claimed)
        if not void and not math.isnan(claimed) and abs(claimed - total) > 1e-9 * max(1.0, total):
            found.setdefault(-2, set()).add("divisor")
        probed: list[_Probed] = []
        looked = [self._alike_and_sums(group, read[group]) for group in range(len(self._comms))]
        if not all(self._are_surely_fine(group, *found_there) for group, found_there in enumerate(looked)):
            for group, (unequal, rows) in enumerate(looked):
                for index, kinds in self._kinds(group, unequal).items():
                    found.setdefault(index, set()).update(kinds)
                probed += self._probed(group, rows)
        if not void:
            for index in self._badly_reduced(probed):
                found.setdefault(index, set()).add("gradient")
        return found, bool(found)

    def _alike_and_sums(self, group: int, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ranks have not alike, bool `[subjects, 3]`, and the sums over samples: float64
        `[subjects, 2 * _PROBES + 2]`, of what came, what is left, of what size it is, and the count.
        """
        end = _HEAD + len(self._indices("replicas", group)) * 12
        unequal = differ(read[_HEAD:end].reshape(-1, 4), self._comms[group].world_size).reshape(-1, 3)
        return unequal, read[end:].reshape(-1, 2 * _PROBES + 2)

    def _are_surely_fine(self, group: int, unequal: Tensor, rows: Tensor) -> bool:
        """Whether everything is alike and all sums are finite and what they have to be, by a known factor."""
        if not self._local.is_strict or bool(unequal.any()):
            return False
        came, left = rows[:, :_PROBES], rows[:, _PROBES : 2 * _PROBES]
        scale, count = rows[:, -2:].split(1, 1)
        world_size = float(self._comms[group].world_size)
        factors = 1.0 / torch.where(count == 0, torch.full_like(count, world_size), count)
        return bool(((left - factors * came).abs() <= self._tolerance * factors * scale).all())

    def _kinds(self, group: int, unequal: Tensor) -> dict[int, set[str]]:
        """Return in what ranks differ, by subject."""
        found: dict[int, set[str]] = {}
        for index, row in zip(self._indices("replicas", group), unequal.tolist(), strict=True):
            kinds = {kind for kind, is_odd in zip(_KINDS, row, strict=True) if is_odd}
            if self._void:
                kinds.discard("gradient")
            if kinds:
                found[index] = kinds
        return found

    def _probed(self, group: int, rows: Tensor) -> list[_Probed]:
        """Return the sums over samples of every subject, and note its factor."""
        found = []
        world_size = self._comms[group].world_size
        for index, (*values, scale, count) in zip(self._indices("summed", group), rows.tolist(), strict=True):
            factor = self._factors[index] = 1.0 / (count or world_size)
            due = [factor * came for came in values[:_PROBES]]
            found.append(_Probed(index, due, values[_PROBES:], factor * scale))
        return found

    def _badly_reduced(self, probed: Sequence[_Probed]) -> list[int]:
        """Return the subjects whose reduced gradient is not what came, times the factor."""
        known = [row for row in probed if row.is_known]
        common = 1.0
        if not self._local.is_strict:
            ratios = [ratio for row in known for ratio in row.ratios()]
            common = statistics.median_low(ratios) if ratios else 1.0
        return [row.index for row in known if row.is_off(common, self._tolerance)]

    def _explain(self, suspects: dict[int, set[str]]) -> list[Finding]:
        """Gather what every rank knows of its suspects, and find causes; the same on every rank."""
        local = self._local
        mine = {index: kinds for index, kinds in suspects.items() if index >= 0}
        gathered = {
            self._subjects[index].name: _Suspect(
                kinds,
                self._subjects[index].kind,
                self._evidence(index),
                self._factors.get(index, 1.0),
            )
            for index, kinds in list(mine.items())[:_MOST]
        }
        general = {index: kinds for index, kinds in suspects.items() if index < 0}
        everybody = self._comms[0].all_gather_object((gathered, general, local.numbers))
        found = []
        for name in dict.fromkeys(name for names, _, _ in everybody for name in names):
            found += _findings_of(name, [names.get(name) for names, _, _ in everybody])
        if any(-1 in kinds for _, kinds, _ in everybody):
            text = f"{difference([numbers for _, _, numbers in everybody])}: set it alike on every rank"
            found.append(("hyperparameters", "", (), text))
        if any(-2 in kinds for _, kinds, _ in everybody):
            text = f"the sum was divided by {float(local.claimed):g}, and {self._total:g} was counted"
            found.append(("divisor", "", (), text))
        return _grouped(found, local.step, local.since)

    def _evidence(self, index: int) -> SubjectEvidence:
        local = self._local
        bits = [
            int(value) if has else None
            for value, has in zip(local.bits[index].tolist(), local.has[index], strict=True)
        ]
        subject = self._subjects[index]
        is_whole = not hasattr(subject.tensor, "to_local")
        return SubjectEvidence(
            bits=(bits[0], bits[1], bits[2]),
            came=local.came[index].cpu(),
            last=local.last[index].cpu(),
            left=local.left[index].cpu() * (subject.shard.copies if is_whole else 1),
            count=float(local.counts[index]),
            arrivals=local.arrivals[index],
            is_whole=is_whole,
        )


def _weights(samples: Tensor) -> Tensor:
    """Return what the samples of a gradient are added up with, of size 1 at most: float64 `[n, _PROBES]`."""
    places = torch.arange(samples.shape[1] * _PROBES, dtype=torch.float64, device=samples.device)
    return torch.cos(1 + 2.4 * places).reshape(-1, _PROBES)


@dataclass(frozen=True)
class _Probed:
    """A few sums over the samples of one gradient, and over all ranks.

    Attributes:
        index: of the subject.
        due: what they have to be.
        left: what they are.
        scale: what they are of the size of.
    """

    index: int
    due: Sequence[float]
    left: Sequence[float]
    scale: float

    @property
    def is_known(self) -> bool:
        """Whether anything came, and all of it is finite."""
        return self.scale > 0 and all(map(math.isfinite, (*self.due, *self.left, self.scale)))

    def ratios(self) -> list[float]:
        """Return by what factors they are off, as far as rounding allows."""
        pairs = zip(self.due, self.left, strict=True)
        return [left / due for due, left in pairs if abs(due) > 0.05 * self.scale]

    def is_off(self, common: float, tolerance: float) -> bool:
        """Whether they are not what they have to be, times a factor."""
        slack = tolerance * abs(common) * self.scale
        pairs = zip(self.due, self.left, strict=True)
        return any(abs(left - common * due) > slack for due, left in pairs)


@dataclass(frozen=True)
class _Suspect:
    """What one rank knows of a suspect: in what it differs, what it is, and the evidence with its factor."""

    differs: set[str]
    kind: str
    evidence: SubjectEvidence
    factor: float


_Raw = tuple[str, str, tuple[int, ...], str]


def _findings_of(name: str, suspects: Sequence[_Suspect | None]) -> list[_Raw]:
    """Return what is wrong with one subject, the root first."""
    by_rank = {rank: each for rank, each in enumerate(suspects) if each is not None}
    kinds = set().union(*(each.differs for each in by_rank.values()))
    evidence = {rank: each.evidence for rank, each in by_rank.items()}
    first = next(iter(by_rank.values()))
    kind, factor = first.kind, first.factor

    def odd(column: int) -> tuple[int, ...]:
        return odd_ranks({rank: item.bits[column] for rank, item in evidence.items()})

    if "gradient" in kinds:
        return [("gradient", name, odd(_GRADIENT), cause_of_gradient(Case(evidence, factor)))]
    if "optimizer state" in kinds:
        return [("optimizer state", name, odd(_STATE), STATE)]
    return [(kind, name, odd(_PARAMETER), BUFFER if kind == "buffer" else BITS)]


_ORDER = ("divisor", "gradient", "hyperparameters", "optimizer state", "parameter", "buffer")


def _grouped(found: Sequence[_Raw], step: int, since: int) -> list[Finding]:
    """Group what differs in the same way, roots first."""
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for what, name, ranks, cause in found:
        groups.setdefault((what, ranks, cause), []).extend([name] if name else [])
    findings = [
        Finding(what, tuple(names), ranks, cause, step, since)
        for (what, ranks, cause), names in groups.items()
    ]
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.what), -len(finding.names)))
