"""The auditor, which checks windows during training and raises an error if ranks differ.

In each check, every rank contributes one short vector per process group, and all ranks draw the same
conclusion from the sums of these vectors.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from pyengine.audit.causes import SubjectEvidence, cause_of_gradient, odd_ranks
from pyengine.audit.checksum import Part, checksums_on, differ, pieces, words_of
from pyengine.audit.inventory import Subject
from pyengine.audit.probe import Leaves, Probe
from pyengine.comm.base import Comm
from pyengine.ops.device import HOST, Readback, runs_ahead

TOLERANCE = 2**-5
# Each check reads a short range of words from every gradient and every optimizer state tensor. Over
# `_ROUND` checks, each tensor is read completely once.
_ROUND = 64
_PARAMETER, _GRADIENT, _STATE = range(3)
_KINDS = ("parameter", "gradient", "optimizer state")
_MOST = 32  # Maximum number of tensors for which error information is gathered.
_PROBES = 3  # Number of weighted sums over the samples; a single sum could match by chance.
# Length of the head of a vector from `_pack`: `count`, `void`, and four numbers for the checksum of the
# hyperparameters.
_HEAD = 6

Numbers = list[tuple[str, float]]


@dataclass(frozen=True)
class Finding:
    """One difference between ranks, or between a reduced gradient and its expected value.

    Attributes:
        what: "gradient", "parameter", "optimizer state", "hyperparameters", "buffer" or "divisor".
        names: names of all tensors that differ in this way, in the order of the model; empty if no tensor
            differs.
        ranks: ranks whose values are known to be wrong or different; empty if the values of all ranks are
            wrong, or if the wrong ranks are unknown.
        cause: the likely cause.
        step: the window in which the difference was found.
        since: the earliest window in which the difference can have begun, which is the window after the last
            check that found no difference.
    """

    what: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    cause: str
    step: int
    since: int

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        whose = f" of {self.names[0]!r}{more}" if self.names else ""
        who = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        since = "" if self.since == self.step else f", since step {self.since} at the earliest"
        return f"{self.what}{whose}{who}, at step {self.step}{since}: {self.cause}"


class AuditError(RuntimeError):
    """Raised on every rank if ranks differ, or if a reduced gradient does not match its inputs.

    Attributes:
        findings: the differences, with the likeliest root cause first; the same on every rank.
    """

    def __init__(self, text: str, findings: Sequence[Finding]) -> None:
        super().__init__(text)
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[type[AuditError], tuple[str, tuple[Finding, ...]]]:
        return type(self), (str(self), self.findings)


@dataclass(frozen=True)
class Samples:
    """A few elements of every gradient of one window, read after its reduction."""

    # The tensors are float64 [subjects, n]; see `SubjectEvidence`. `left` is this rank's part of the reduced
    # gradient.
    came: Tensor
    last: Tensor
    left: Tensor
    arrivals: Sequence[int]  # Number of local gradients by subject (audited tensor).
    is_strict: bool  # Whether the factor of the reduction is known; otherwise any common factor is accepted.


@dataclass(frozen=True)
class Counted:
    """The item counts of a window, from the training loop: float64 tensors, 0-dim except for `counts`."""

    # The items in this rank's micro-batches, by subject (of shape [subjects]); None if gradients are means
    # over ranks.
    counts: Tensor | None = None
    count: Tensor | float = 0.0  # This rank's items; the sum over ranks must equal `claimed`.
    claimed: Tensor | float = math.nan  # The divisor of the sum over all ranks; nan if unknown.
    void: Tensor | float = 0.0  # Greater than 0 if the gradients are not used.


class Auditor:
    """Compares values that must be equal on all ranks, once every `every` windows.

    Args:
        subjects: the audited tensors, in the same order on all ranks of a group.
        comms: transports, indexed by `Subject.replicas` and `Subject.summed`; the first transport spans all
            ranks.
        leaves: the autograd leaves at which gradients arrive.
        tolerance: the largest allowed relative error of a reduced gradient.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        comms: Sequence[Comm],
        leaves: Leaves,
        *,
        tolerance: float,
        every: int,
    ) -> None:
        self._subjects, self._comms, self._tolerance = list(subjects), list(comms), tolerance
        self.device = device = self._subjects[0].tensor.device
        # A rank that is in only one group must also learn the results of other groups.
        self._is_one_group = not any(num > 1 for num in comms[0].all_gather_object(len(comms)))
        numel = sum(subject.tensor.numel() for subject in self._subjects)
        self._checksums = checksums_on(device, numel)
        self.probe = Probe(self._subjects, leaves, device)
        self.optimizers: list[Any] = []  # the optimizers whose state and hyperparameters are compared
        self._under_way: tuple[LocalCheck, list[Readback]] | None = None
        # `_since`: the first window after the last check that found no difference.
        self._checks, self._since = 0, 0
        self._listens_on = every == 1

    def begin(self) -> None:
        """Start observing a window before its first micro-batch; raise if the previous check failed."""
        self.conclude()
        self.probe.arm(self._checks)

    @torch.no_grad()
    def sample(self, *, is_strict: bool, scale: Tensor | None = None) -> Samples:
        """Read samples of the gradients after their reduction; the next gradient begins a new window.

        Args:
            is_strict: whether gradients have not been changed since their reduction.
            scale: the loss scale, which is a factor of the local gradients but not of the reduced gradients.
        """
        probe = self.probe
        came = (probe.all_sums() if is_strict else probe.sums).double()
        last, left = probe.last.double(), probe.reduced()
        if scale is not None:
            came, last = came / scale, last / scale
        if not probe.is_armed:
            came = torch.zeros_like(came)
        samples = Samples(came, last, left, probe.arrivals, is_strict)
        probe.end()
        return samples

    @torch.no_grad()
    def check(self, step: int, samples: Samples, counted: Counted) -> None:
        """Compare all ranks, after the reduction and before the step.

        Raises:
            AuditError: the check found a difference. If the host runs ahead of the device, the next `begin`
                or `conclude` raises the error.

        Cost: one all-reduce per group, of 48 bytes plus 160 bytes per audited tensor.
        """
        if not self._listens_on:
            self.probe.disarm()
        local = self._look(step, samples, counted)
        vectors = [self._pack(local, group) for group in range(len(self._comms))]
        works = [comm.all_reduce(vector) for comm, vector in zip(self._comms, vectors, strict=True)]
        for work in works:
            work.wait()
        self._under_way = local, [Readback(vector) for vector in vectors]
        self._checks += 1
        if not runs_ahead(self.device):
            self.conclude()

    def conclude(self) -> None:
        """Wait for the pending check, if any, and raise on every rank if it found a difference.

        Cost: the wait, and one all-reduce of 4 bytes if there are several groups. If the check found a
            difference, also a gather of the observations of all ranks.
        """
        if self._under_way is None:
            return
        (local, readbacks), self._under_way = self._under_way, None
        read = [torch.tensor(numbers.get(), dtype=torch.float64, device=HOST) for numbers in readbacks]
        suspects = self._suspects(local, read)
        is_bad = bool(suspects)
        if not self._is_one_group:
            flag = torch.tensor([is_bad], dtype=torch.float32, device=self.device)
            self._comms[0].all_reduce(flag).wait()
            is_bad = bool(flag > 0)
        if is_bad and (findings := self._explain(local, suspects)):
            more = "".join(f"; {finding}" for finding in findings[1:4])
            raise AuditError(f"audit: {findings[0]}{more}", findings)
        self._since = local.step + 1

    def _look(self, step: int, samples: Samples, counted: Counted) -> LocalCheck:
        numbers, tensors = numbers_of(self.optimizers)
        hyper = torch.tensor(digest(numbers), dtype=torch.int64, device=self.device)
        for tensor in tensors:
            hyper = hyper * 31 + self._checksums.of(words_of(tensor))
        bits, has = self._bits()
        return LocalCheck(step, bits, has, samples, counted, hyper, numbers)

    def _bits(self) -> tuple[Tensor, list[tuple[bool, bool, bool]]]:
        """Return checksums of all audited tensors (int64 `[subjects, 3]`), and which tensors exist."""
        states: dict[int, Any] = {
            id(param): state for optimizer in self.optimizers for param, state in optimizer.state.items()
        }
        reads: list[tuple[int, int, Part]] = []  # index and factor of a checksum, and the part to read
        known, has = [], []
        for index, subject in enumerate(self._subjects):
            state, grad = states.get(id(subject.tensor), {}), subject.gradient()
            has.append((True, grad is not None, bool(state)))
            if subject.replicas is None:
                known += [0, 0, 0]
                continue
            turn = None if index % _ROUND == self._checks % _ROUND else self._checks
            reads.append((3 * index, 1, Part(subject.tensor)))
            if grad is not None:
                reads.append((3 * index + 1, 1, Part(grad, turn)))
            tensors, numbers = states_of(state)
            reads += [(3 * index + 2, 2 * place + 3, Part(each, turn)) for place, each in enumerate(tensors)]
            known += [0, 0 if grad is not None else -1, digest([("", number) for number in numbers])]
        bits = torch.tensor(known, dtype=torch.int64, device=self.device)
        weights = torch.tensor([factor for _, factor, _ in reads], dtype=torch.int64, device=self.device)
        places = torch.tensor([place for place, _, _ in reads], dtype=torch.int64, device=self.device)
        bits.index_add_(0, places, self._checksums.of_all([part for _, _, part in reads]) * weights)
        return bits.view(-1, 3), has

    # ---- comparison of all ranks ----

    def _pack(self, local: LocalCheck, group: int) -> Tensor:
        """Return this rank's float64 vector for the sum over a group: 48 bytes plus 160 bytes per tensor."""
        came = local.samples.came
        head = torch.zeros(_HEAD, dtype=torch.float64, device=self.device)
        if group == 0:
            head[0], head[1] = local.counted.count, local.counted.void
            head[2:] = pieces(local.hyper.reshape(1))[0]
        same = self._indices("replicas", group)
        summed = self._indices("summed", group)
        # Weights for the sums over a gradient's samples: float64 [n, _PROBES], each of magnitude at most 1.
        places = torch.arange(came.shape[1] * _PROBES, dtype=torch.float64, device=came.device)
        weights = torch.cos(1 + 2.4 * places).reshape(-1, _PROBES)
        scale = came.abs().sum(1, keepdim=True)
        counts = torch.zeros_like(scale) if local.counted.counts is None else local.counted.counts[:, None]
        parts = [came @ weights, local.samples.left @ weights, scale, counts]
        probed = torch.cat(parts, 1)[summed]
        return torch.cat([head, pieces(local.bits[same].reshape(-1)).reshape(-1), probed.reshape(-1)])

    def _indices(self, which: str, group: int) -> list[int]:
        return [i for i, subject in enumerate(self._subjects) if getattr(subject, which) == group]

    def _suspects(self, local: LocalCheck, read: Sequence[Tensor]) -> dict[int, set[str]]:
        """Return differences by tensor index (-1: hyperparameters, -2: count), from each group's sums."""
        found: dict[int, set[str]] = defaultdict(set)
        self._total, void = float(read[0][0]), float(read[0][1])
        if bool(differ(read[0][2:_HEAD].reshape(1, 4), self._comms[0].world_size)):
            found[-1].add("hyperparameters")
        off = abs(float(local.counted.claimed) - self._total)
        if not void and off > 1e-9 * max(1.0, self._total):
            found[-2].add("divisor")
        rows = []
        for group, (numbers, comm) in enumerate(zip(read, self._comms, strict=True)):
            same = self._indices("replicas", group)
            end = _HEAD + 12 * len(same)
            unequal = differ(numbers[_HEAD:end].reshape(-1, 4), comm.world_size).reshape(-1, 3)
            for place, column in unequal.nonzero().tolist():
                if not (void and column == _GRADIENT):
                    found[same[place]].add(_KINDS[column])
            sums = numbers[end:].reshape(-1, 2 * _PROBES + 2)
            sums[:, -1].masked_fill_(sums[:, -1] == 0, comm.world_size)  # a mean over ranks has no count
            rows.append(sums)
        for index in self._badly_reduced(local.samples, torch.cat(rows), is_used=not void):
            found[index].add("gradient")
        return found

    def _badly_reduced(self, samples: Samples, rows: Tensor, *, is_used: bool) -> list[int]:
        """Return the tensors whose reduced gradient is not the sum of local gradients divided by the count.

        `rows` is float64 `[subjects, 2 * _PROBES + 2]`. A row contains `_PROBES` weighted sums of the local
        samples, `_PROBES` weighted sums of the reduced samples, the magnitude of the local samples, and the
        count.
        """
        indices = [index for group in range(len(self._comms)) for index in self._indices("summed", group)]
        came, left, scale, count = rows.split((_PROBES, _PROBES, 1, 1), 1)
        factors = 1.0 / count
        due, scale = factors * came, factors * scale
        self._factors = torch.ones(len(self._subjects), dtype=torch.float64, device=HOST)
        self._factors[indices] = factors.flatten()
        # The audited tensors that have local gradients, all of them finite.
        is_known = (scale > 0).flatten() & torch.cat([due, left, scale], 1).isfinite().all(1) & is_used
        common = 1.0
        if not samples.is_strict:
            # Small sums are left out, because rounding hides their factor.
            ratios = (left / due)[(due.abs() > 0.05 * scale) & is_known.unsqueeze(1)]
            common = float(ratios.median()) if len(ratios) else 1.0
        slack = self._tolerance * abs(common) * scale
        is_off = ((left - common * due).abs() > slack).any(1) & is_known
        return [indices[place] for place in is_off.nonzero().flatten().tolist()]

    def _explain(self, local: LocalCheck, suspects: dict[int, set[str]]) -> list[Finding]:
        """Gather the observations of all ranks and find causes; the result is equal on every rank."""
        gathered = {}
        for index, kinds in [(index, kinds) for index, kinds in suspects.items() if index >= 0][:_MOST]:
            gathered[self._subjects[index].name] = self._evidence(local, index, kinds)
        general = [index for index in suspects if index < 0]
        by_rank = self._comms[0].all_gather_object((gathered, general, local.numbers))
        found = [
            _finding_of(name, [names.get(name) for names, _, _ in by_rank])
            for name in dict.fromkeys(name for names, _, _ in by_rank for name in names)
        ]
        if any(-1 in kinds for _, kinds, _ in by_rank):
            text = f"{difference([numbers for _, _, numbers in by_rank])}: use equal settings on all ranks"
            found.append(("hyperparameters", "", (), text))
        if any(-2 in kinds for _, kinds, _ in by_rank):
            text = f"the sum was divided by {float(local.counted.claimed):g}, but {self._total:g} was counted"
            found.append(("divisor", "", (), text))
        return _grouped(found, local.step, self._since)

    def _evidence(self, local: LocalCheck, index: int, differs: set[str]) -> SubjectEvidence:
        samples = local.samples
        bits = [
            int(value) if has else None
            for value, has in zip(local.bits[index].tolist(), local.has[index], strict=True)
        ]
        subject = self._subjects[index]
        is_whole = not hasattr(subject.tensor, "to_local")
        return SubjectEvidence(
            differs=differs,
            kind=subject.kind,
            factor=float(self._factors[index]),
            bits=bits,
            came=samples.came[index].cpu(),
            last=samples.last[index].cpu(),
            left=samples.left[index].cpu() * (subject.shard.copies if is_whole else 1),
            count=0.0 if local.counted.counts is None else float(local.counted.counts[index]),
            arrivals=samples.arrivals[index],
            is_whole=is_whole,
        )


# ---- optimizer settings, which must be equal on all ranks ----


def states_of(state: Mapping[Any, Any]) -> tuple[list[Tensor], list[float]]:
    """Return the optimizer state of one parameter: its tensors, and its numbers on the host."""
    tensors, numbers = [], []
    for key in sorted(state, key=str):
        value = state[key]
        if isinstance(value, Tensor) and (value.numel() != 1 or runs_ahead(value.device)):
            tensors.append(value)
        elif isinstance(value, int | float | Tensor):
            numbers.append(float(value))
    return tensors, numbers


def numbers_of(optimizers: Sequence[Any]) -> tuple[Numbers, list[Tensor]]:
    """Return all hyperparameters by name; hyperparameters on an accelerator are returned as tensors."""
    numbers: Numbers = []
    tensors: list[Tensor] = []
    for place, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            where = f"{place}." if len(optimizers) > 1 else ""
            for key in sorted(key for key in group if key != "params"):
                for value in group[key] if isinstance(group[key], tuple | list) else (group[key],):
                    if isinstance(value, Tensor) and value.numel() != 1:
                        continue
                    if isinstance(value, Tensor) and runs_ahead(value.device):
                        tensors.append(value)
                    elif isinstance(value, Real | Tensor):
                        numbers.append((f"{key} of group {where}{index}", float(value)))
    return numbers, tensors


def digest(numbers: Numbers) -> int:
    raw = b"".join(struct.pack("<d", value) + name.encode() for name, value in numbers)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 2


def difference(by_rank: Sequence[Numbers]) -> str:
    """Describe the first number that differs between ranks, with the value on each rank."""
    for row in zip(*by_rank, strict=False):
        if len(set(row)) > 1:
            values = "; ".join(f"rank {rank}: {value:g}" for rank, (_, value) in enumerate(row))
            return f"{row[0][0]} differs ({values})"
    if len({len(numbers) for numbers in by_rank}) > 1:
        return "ranks have different param_groups"
    return "a hyperparameter on the device differs"


# ---- one check ----


@dataclass(frozen=True)
class LocalCheck:
    """The observations of one rank in one window."""

    step: int
    bits: Tensor  # int64 [subjects, 3], checksums of parameter, gradient and optimizer state.
    has: Sequence[tuple[bool, bool, bool]]  # Which of these checksums exist.
    samples: Samples
    counted: Counted
    hyper: Tensor  # a digest of the hyperparameters (0-dim int64)
    numbers: Numbers


_Raw = tuple[str, str, tuple[int, ...], str]


def _finding_of(name: str, suspects: Sequence[SubjectEvidence | None]) -> _Raw:
    """Return the root cause of all differences in one audited tensor."""
    by_rank = {rank: each for rank, each in enumerate(suspects) if each is not None}
    evidence = [*by_rank.values()]
    kinds, kind = set().union(*(each.differs for each in evidence)), evidence[0].kind

    def odd(column: int) -> tuple[int, ...]:
        return odd_ranks({rank: each.bits[column] for rank, each in by_rank.items()})

    if "gradient" in kinds:
        return "gradient", name, odd(_GRADIENT), cause_of_gradient(evidence)
    if "optimizer state" in kinds:
        cause = "gradients agree, but the optimizer state does not: loaded or changed on only some ranks"
        return "optimizer state", name, odd(_STATE), cause
    cause = (
        "a buffer that must be equal on all ranks has different bits"
        if kind == "buffer"
        else "gradients and optimizer state agree, but the parameter has different bits: a flipped bit, a "
        "write or a step on only some ranks"
    )
    return kind, name, odd(_PARAMETER), cause


_ORDER = ("divisor", "gradient", "hyperparameters", "optimizer state", "parameter", "buffer")


def _grouped(found: Sequence[_Raw], step: int, since: int) -> list[Finding]:
    """Group audited tensors that differ in the same way, root causes first."""
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for what, name, ranks, cause in found:
        groups.setdefault((what, ranks, cause), []).extend([name] if name else [])
    findings = [
        Finding(what, tuple(names), ranks, cause, step, since)
        for (what, ranks, cause), names in groups.items()
    ]
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.what), -len(finding.names)))
