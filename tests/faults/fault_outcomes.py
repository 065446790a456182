"""How a case must end, checked against the report of every rank.

For every end: no rank hangs, no rank dies except the one that the case kills, the fault struck where the case
says, and the parameters have the bits that recomputing the ranks' steps in one process gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from fault_cases import ACCUMULATE, BEHIND_A_BUCKET, DEADLY, LOOPS, Case
from fault_scenario import LEARNING_RATE, Integers, Report, batch, items
from ranks import Ended

EXIT_CODES = {"sys.exit": 3, "os._exit": 4, "kill": -9}


class Outcome:
    """How the ranks of a case ended.

    Attributes:
        reports: the report of each rank; ranks that died are missing.
    """

    def __init__(self, case: Case, ends: Sequence[Ended]) -> None:
        self._case = case
        self._check_ends(ends)
        self.reports: dict[int, Report] = {
            rank: end.value for rank, end in enumerate(ends) if end.value is not None
        }
        self._others = {rank: report for rank, report in self.reports.items() if rank != case.rank}
        if case.rank in self.reports:
            self._check_fault(self.reports[case.rank])

    def __str__(self) -> str:
        return "".join(
            f"\n  rank {rank}: windows stepped {t.windows}, skipped {t.skipped}, caught {t.caught!r}, error "
            f"{t.error!r}"
            for rank, t in self.reports.items()
        )

    def replaced(self) -> None:
        """Check that the other ranks have not noticed the fault."""
        self._goes_on(skipped=0)

    def voided(self) -> None:
        """Check that the other ranks skipped the window and named the faulty rank."""
        self._goes_on(skipped=1)
        error = self._fault().partition(":")[0]
        for report in self._others.values():
            assert (
                len(report.skipped) == 1 and f"rank {self._case.rank} gave up the window" in report.skipped[0]
            ), self
            assert error in report.skipped[0], self

    def used(self) -> None:
        """Check that every rank stepped the window, and that the faulty rank continued after it."""
        self._goes_on(skipped=0)
        assert self._case.window in self._report_of_fault().windows, self

    def reported(self) -> None:
        """Check that all ranks continued, and that one rank warned once which rank it waited for."""
        self._goes_on(skipped=0)
        warned = [text for each in self.reports.values() for text in each.warned if "fault_trap.py" in text]
        late, window = f"rank {self._case.rank}", f"window {self._case.window}"
        assert len(warned) == 1, warned
        assert f"{late} of {self._case.world} has not launched" in warned[0], warned
        line = rf"{late} \(process \d+ .*{window}, .*fault_trap.py:\d+ in (_come_late|_pause)"
        assert re.search(line, warned[0]), warned
        waiting = [f"rank {rank}" for rank in range(self._case.world) if rank != self._case.rank]
        assert all(re.search(rf"{rank} \(process.*waits in an? ", warned[0]) for rank in waiting), warned

    def raises(self) -> None:
        """Check that every rank got an error, and that none has stepped the window."""
        self._ends_with_errors(steps={self._case.window})
        if self._case.rank in self.reports:
            assert len(self._report_of_fault().windows) <= self._case.window, self

    def used_raises(self) -> None:
        """Check that the other ranks stepped the window, and got an error in the next one."""
        self._ends_with_errors(steps={self._case.window + 1})

    def breaks(self) -> None:
        """Check that every rank got an error, in this window or in the next one."""
        self._ends_with_errors(steps={self._case.window, self._case.window + 1})

    def parted(self) -> None:
        """Check that every rank got the error, in the next window, that ranks are not at the same place."""
        self._ends_with_errors(steps={self._case.window + 1})
        for report in self.reports.values():
            assert "ranks are not at the same place" in report.error, self

    def used_or_raises(self) -> None:
        """Check that either all ranks continued together, or all got an error."""
        if any(report.error for report in self.reports.values()):
            self.used_raises()
        else:
            self.used()

    def _check_ends(self, ends: Sequence[Ended]) -> None:
        for rank, end in enumerate(ends):
            is_faulty = rank == self._case.rank
            assert not end.is_silent, f"rank {rank} hangs; the others: {[e.value for e in ends]}"
            assert not end.error, f"rank {rank} could not run the case:\n{end.error}"
            dies = is_faulty and self._case.fault in DEADLY
            assert end.exit_code == (EXIT_CODES[self._case.fault] if dies else None), f"rank {rank}: {end}"
            assert end.was_stopped == (is_faulty and self._case.fault == "stop"), f"rank {rank}: {end}"

    def _check_fault(self, report: Report) -> None:
        """Check that the fault struck, and that as much had been sent by then as the phase says."""
        assert report.sent >= 0, f"the fault never struck: {self}"
        header = 0 if self._case.has("hook") else 1
        if self._case.phase == "last backward":
            assert report.sent == header, self
        elif self._case.phase in BEHIND_A_BUCKET and not self._may_wait:
            assert report.sent > header, self
        elif self._case.phase.startswith("early"):
            assert report.sent == 0, self

    @property
    def _may_wait(self) -> bool:
        """Whether complete buckets may be sent later.

        Buckets on a narrow wire need the count. In the first window DDP has one bucket, and `GradSync` has
        yet to learn what this model's custom Functions do inside a backward.
        """
        return self._case.has("bf16") or self._case.window == 0

    @property
    def _meets_in_ddp(self) -> bool:
        """Whether the other ranks may next wait in DDP's own collective, which raises the transport's error.

        In the second window's first forward, DDP's ranks agree on its buckets.
        """
        return self._case.has("attach") and self._case.window == 0

    def _goes_on(self, *, skipped: int) -> None:
        """Check that every rank finished its loops, with the same steps and the right bits."""
        assert not any(report.error for report in self.reports.values()), self
        if self._case.fault not in ("pause", "late"):
            assert self._report_of_fault().caught == self._fault(), self
        for rank, report in self.reports.items():
            assert len(report.windows) == len(set(report.windows)) == self._num_windows() - skipped, self
            assert len(report.skipped) == skipped or rank == self._case.rank, self
        assert len({tuple(report.windows) for report in self.reports.values()}) == 1, self
        want = _trained(self._case, [report.steps for report in self.reports.values()])
        for rank, report in self.reports.items():
            assert report.params == want, f"rank {rank} has other parameters than its steps give: {self}"

    def _ends_with_errors(self, *, steps: set[int]) -> None:
        """Check that every surviving rank raised, and that the others' steps are right, each taken once."""
        assert all(report.error for report in self.reports.values()), self
        if self._case.fault == "kill" and not (self._case.has("hook") or self._meets_in_ddp):
            found = {_finding(report.error) for report in self.reports.values()}
            assert len(found) == 1, [report.error for report in self.reports.values()]
            (finding,) = found
            assert f"rank {self._case.rank} of {self._case.world} has died" in finding, finding
        for rank, report in self._others.items():
            assert len(report.windows) in steps and len(report.windows) == len(set(report.windows)), self
            assert report.params == _trained(self._case, self._planned(len(report.windows))), (
                f"rank {rank}: {self}"
            )

    def _report_of_fault(self) -> Report:
        return self.reports[self._case.rank]

    def _fault(self) -> str:
        kind = "KeyboardInterrupt" if self._case.fault == "interrupt" else "Boom"
        return f"{kind}: user's code failed"

    def _num_windows(self) -> int:
        """Return the number of windows to step; if one is cut short, its loop has one more."""
        is_cut = self._case.phase in ("flush", "flushed") and not self._case.has("accumulate")
        return sum(LOOPS) + is_cut

    def _planned(self, steps: int) -> list[list[list[int]]]:
        """Return, by rank, the micro-batches of the first windows if no rank has lost any data."""
        is_cut = self._case.phase in ("flush", "flushed")
        sizes = [1 if is_cut and window == self._case.window else ACCUMULATE for window in range(steps)]
        starts = [ACCUMULATE * window for window in range(steps)]
        return [
            [
                [1000 * rank + start + k for k in range(size)]
                for start, size in zip(starts, sizes, strict=True)
            ]
            for rank in range(self._case.world)
        ]


def _trained(case: Case, steps: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """Return the parameters after `steps`, given as micro-batches by rank.

    Each step is computed from integer sums and one float32 product.
    """
    model = Integers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for parts in zip(*steps, strict=True):
        twin = Integers().double()
        for index in [index for part in parts for index in part]:
            _, x, t = batch(index)
            twin(x.double(), t.double()).backward()
        count = (
            case.world
            if case.has("hook")
            else sum(items(rank) * len(part) for rank, part in enumerate(parts))
        )
        inverse = torch.tensor(1.0 / count, dtype=torch.float64).float()
        for param, exact in zip(model.parameters(), twin.parameters(), strict=True):
            assert exact.grad is not None
            param.grad = exact.grad.float() * inverse
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


ENDS = {
    "replaced": Outcome.replaced,
    "voided": Outcome.voided,
    "used": Outcome.used,
    "unnoticed": Outcome.replaced,
    "reported": Outcome.reported,
    "raises": Outcome.raises,
    "used, raises": Outcome.used_raises,
    "used or raises": Outcome.used_or_raises,
    "breaks": Outcome.breaks,
    "parted": Outcome.parted,
}


def _finding(error: str) -> str:
    """Return the part of an error that names the cause, without torch's details; else the whole error."""
    found = re.search(r"a collective failed: .*? from a checkpoint", error)
    return error if found is None else found.group()
