"""The auditor: checks windows as they run, and raises what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyengine.audit.check import Check, Local
from pyengine.audit.checksum import Part, checksums_on, words_of
from pyengine.audit.finding import raise_for
from pyengine.audit.hyperparameters import digest, numbers_of
from pyengine.audit.leaves import Leaves
from pyengine.audit.probe import Probe
from pyengine.audit.subject import Subject, states_of
from pyengine.comm.base import Comm
from pyengine.ops.device import runs_ahead

TOLERANCE = 2**-5
# Of every gradient and every tensor of an optimizer's state a run of words is read in each check, and each is
# read as a whole in one of so many.
_ROUND = 64


@dataclass(frozen=True)
class Samples:
    """A few elements of every gradient of one window, behind its reduction.

    Attributes:
        came, last, left, arrivals: see `Local`.
        is_strict: see `Local`.
    """

    came: Tensor
    last: Tensor
    left: Tensor
    arrivals: Sequence[int]
    is_strict: bool


@dataclass(frozen=True)
class Counted:
    """What a loop knows of a window besides its gradients.

    Attributes:
        counts: by subject, what this rank's micro-batches counted, float64 `[subjects]`; None: gradients are
            means over ranks.
        count: of all of them, to be compared with `claimed`: float64 0-dim.
        claimed: what the sum over all ranks was divided by, float64 0-dim; None: not known.
        void: more than 0 where the gradients are not to be used, 0-dim; None: they are.
    """

    counts: Tensor | None = None
    count: Tensor | None = None
    claimed: Tensor | None = None
    void: Tensor | None = None


class Auditor:
    """Compares what must be equal on all ranks.

    Args:
        subjects: what; the same ones, in the same order, on all ranks of a group.
        comms: transports by `Subject.replicas` and `Subject.summed`; the first is of all ranks.
        leaves: where gradients arrive.
        tolerance: the largest relative error of a reduced gradient.
        every: windows from one check to the next.

    Attributes:
        probe: records the gradients of micro-batches.
        optimizers: whose state and hyperparameters are compared.
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
        # Some ranks may be in one group only, and still have to learn what another one has found.
        self._is_one_group = not any(num > 1 for num in comms[0].all_gather_object(len(comms)))
        numel = sum(subject.tensor.numel() for subject in self._subjects)
        self._checksums = checksums_on(device, numel)
        self.probe = Probe(self._subjects, leaves, device)
        self.optimizers: list[Any] = []
        self._under_way: Check | None = None
        self._checks, self._since = 0, 0
        self._listens_on = every == 1

    def begin(self) -> None:
        """Look at a window from its first micro-batch on.

        Raises:
            AuditError: what an earlier check has found.
        """
        self.settle()
        self.probe.arm(self._checks)

    @torch.no_grad()
    def sample(self, *, is_strict: bool, scale: Tensor | None = None) -> Samples:
        """Look at gradients behind their reduction; the next one that comes is another window's.

        Args:
            is_strict: whether nothing else has been done to them.
            scale: the loss scale, with which gradients came, and without which they were reduced; None for
                none.
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
        """Compare, behind the reduction and before the step.

        Args:
            step: the window.
            samples: of its gradients.
            counted: what else is known of it.

        Raises:
            AuditError: something differs; where the host runs ahead of the device, at the next `begin` or
                `settle`.
        """
        if not self._listens_on:
            self.probe.disarm()
        local = self._look(step, samples, counted)
        self._under_way = Check(
            self._subjects, self._comms, local, self._tolerance, is_one_group=self._is_one_group
        )
        self._checks += 1
        if not runs_ahead(self.device):
            self.settle()

    def settle(self) -> None:
        """Wait for the check that is under way, if one is.

        Raises:
            AuditError: something differs; on every rank.
        """
        check, self._under_way = self._under_way, None
        if check is not None:
            raise_for(check.conclude())
            self._since = check.step + 1

    def drop(self) -> None:
        """Forget the window that is looked at: it will not be checked."""
        self.probe.disarm()

    def _look(self, step: int, samples: Samples, counted: Counted) -> Local:
        numbers, tensors = numbers_of(self.optimizers)
        hyper = self._one(digest(numbers))
        for tensor in tensors:
            hyper = hyper * 31 + self._checksums.of(words_of(tensor))
        bits, has = self._bits()
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return Local(
            step=step,
            since=self._since,
            bits=bits,
            has=has,
            came=samples.came,
            last=samples.last,
            left=samples.left,
            arrivals=samples.arrivals,
            counts=zero.expand(len(bits)) if counted.counts is None else counted.counts,
            count=zero if counted.count is None else counted.count,
            claimed=zero + torch.nan if counted.claimed is None else counted.claimed,
            void=zero if counted.void is None else counted.void.double(),
            hyper=hyper,
            numbers=numbers,
            is_strict=samples.is_strict,
        )

    def _bits(self) -> tuple[Tensor, list[tuple[bool, bool, bool]]]:
        """Return the checksums of all subjects, int64 `[subjects, 3]`, and which of them there are."""
        states: dict[int, Any] = {
            id(param): state for optimizer in self.optimizers for param, state in optimizer.state.items()
        }
        parts: list[Part] = []  # what is read, where its checksum belongs, and what it is multiplied by
        rows: list[int] = []
        factors: list[int] = []
        known, has = [], []

        def read(row: int, part: Part, factor: int = 1) -> None:
            parts.append(part)
            rows.append(row)
            factors.append(factor)

        for index, subject in enumerate(self._subjects):
            state, grad = states.get(id(subject.tensor), {}), subject.gradient()
            has.append((True, grad is not None, bool(state)))
            if subject.replicas is None:
                known += [0, 0, 0]
                continue
            turn = None if index % _ROUND == self._checks % _ROUND else self._checks
            read(3 * index, Part(subject.tensor))
            if grad is not None:
                read(3 * index + 1, Part(grad, turn))
            tensors, numbers = states_of(state)
            for place, tensor in enumerate(tensors):
                read(3 * index + 2, Part(tensor, turn), 2 * place + 3)
            known += [0, 0 if grad is not None else -1, digest([("", number) for number in numbers])]
        bits = torch.tensor(known, dtype=torch.int64, device=self.device)
        weights = torch.tensor(factors, dtype=torch.int64, device=self.device)
        places = torch.tensor(rows, dtype=torch.int64, device=self.device)
        bits.index_add_(0, places, self._checksums.of_all(parts) * weights)
        return bits.view(-1, 3), has

    def _one(self, number: int) -> Tensor:
        return torch.tensor(number, dtype=torch.int64, device=self.device)
