"""What the ranks conclude together of a window that has landed: outcomes and errors are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.header import Header, LocalWindow, Totals
from pyengine.host import Readback
from pyengine.norm import FinalPass
from pyengine.report import RankFindings, describe, nonfinite_params

# Returns the micro-batches in which this rank saw a parameter's gradient not finite; None: not watched.
Blame = Callable[[int], list[int] | None]


@dataclass(frozen=True)
class Evidence:
    """What one rank can say of its window.

    Attributes:
        index: the window.
        position: this rank's (windows completed, optimizer steps taken).
        local: its counts and losses.
        gave_up: the exception that ended its last backward, as text; empty if none did.
        names: parameters, in registration order.
        blame: which micro-batches brought a parameter's inf or nan.
    """

    index: int
    position: tuple[int, int]
    local: LocalWindow
    gave_up: str
    names: Sequence[str]
    blame: Blame


class Verdict:
    """The outcome of one landed window.

    The device knows at once whether the step may happen (`FinalPass.found_inf`). The host learns it from `reach`, which
    waits for the device, and which every rank calls at the same point of its program: in the bad case ranks talk.

    Args:
        header: landed.
        final: settled; its flags are copied.
        evidence: this rank's.
        comm: transport, used only in the bad case.
        raises: whether inf and nan are an error (the policy "raise") and not merely a reason to skip.

    Attributes:
        totals: sums over all ranks; None until read.
        is_reached: whether the ranks have concluded it.
        is_awaited: whether somebody on this rank waits for the numbers.
        reason: why the step is skipped; empty if it is not.
        error: what `reach` raises; None if nothing, or not reached.
    """

    def __init__(
        self, header: Header, final: FinalPass, evidence: Evidence, *, comm: Any, raises: bool
    ) -> None:
        self.totals: Totals | None = None
        self.reason = ""
        self._evidence, self._comm, self._raises = evidence, comm, raises
        self._numbers = Readback(torch.cat([header.vector(), final.found_inf.double().reshape(1)]))
        self._nonfinite = final.nonfinite.clone()
        self._waiting: list[Callable[[Totals, bool], None]] = []
        self._waiting_to_know: list[Callable[[bool], None]] = []
        self._skips = self.is_reached = self.is_awaited = False
        self.error: Exception | None = None

    def then(self, action: Callable[[Totals, bool], None], *, awaits: bool = True) -> None:
        """Call `action(totals, skipped)` once the verdict is reached; now if it has been.

        Args:
            awaits: whether the action is worth reading the numbers for, where that is not free.
        """
        self.is_awaited = self.is_awaited or awaits
        if self.is_reached:
            assert self.totals is not None
            action(self.totals, self._skips)
        else:
            self._waiting.append(action)

    def once_known(self, action: Callable[[bool], None]) -> None:
        """Call `action(skipped)` once this rank knows, whatever the others say; now if it does."""
        self.is_awaited = True
        if self.totals is None:
            self._waiting_to_know.append(action)
        else:
            action(self._skips)

    @property
    def is_good(self) -> bool:
        """Whether the verdict was read and leaves the ranks nothing to talk about."""
        return self.totals is not None and not self._skips

    def reach(self) -> Totals:
        """Wait for the outcome, and call what waited for it; later calls return or raise the same at once.

        Raises:
            RuntimeError: ranks are at different windows or steps.
            ValueError: a count is negative or not finite.
            FloatingPointError: inf or nan under the policy "raise".
        """
        totals = self.read()
        if not self.is_reached:
            self.is_reached = True
            try:
                self._judge(totals)
            except (ValueError, RuntimeError, FloatingPointError) as error:
                self.error = error.with_traceback(None)  # which would keep every frame alive, this one too
            else:
                for action in self._waiting:
                    action(totals, self._skips)
            self._waiting = []
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        return totals

    def read(self) -> Totals:
        """Wait for the numbers only: no rank talks, nothing is concluded."""
        if self.totals is None:
            *numbers, found_inf = self._numbers.get()
            self._skips = found_inf != 0
            self.totals = Totals.of(numbers, self._comm.world_size)
            for action in self._waiting_to_know:
                action(self._skips)
            self._waiting_to_know = []
        return self.totals

    def _judge(self, totals: Totals) -> None:
        if not self._skips:
            return
        check_agreement(totals, self._comm, position=self._evidence.position, local=self._evidence.local)
        terms = self._evidence.local.terms
        if terms is not None and totals.micro_batches > terms:
            raise ValueError(
                f"window of {totals.micro_batches} micro-batches over all ranks, and accumulator='exact' was made for "
                f"{terms}: its integers may overflow. Nothing was stepped; name the window's size: "
                f"pe.Exact(micro_batches={totals.micro_batches})"
            )
        if totals.count == 0:
            self.reason = "count is 0 on every rank: nothing to average over"
            return
        self.reason = self._why_not_finite()
        if self._raises:
            raise FloatingPointError(f"window {self._evidence.index}: {self.reason}")

    def _why_not_finite(self) -> str:
        """Gather what every rank knows, and say where inf and nan came from."""
        evidence = self._evidence
        params = nonfinite_params(self._nonfinite)
        mine = RankFindings(
            evidence.gave_up, evidence.local.nonfinite_losses(), [evidence.blame(param) for param in params]
        )
        findings: Sequence[RankFindings] = self._comm.all_gather_object(mine)
        return describe([evidence.names[param] for param in params], findings)


def check_agreement(totals: Totals, comm: Any, *, position: tuple[int, int], local: LocalWindow) -> None:
    """Raise on every rank if ranks are at different places or any of them gave an invalid count.

    Args:
        totals: what the header brought.
        comm: transport; used only to say who differs.
        position: this rank's (windows completed, optimizer steps taken).
        local: this rank's counts.

    Raises:
        RuntimeError: ranks are at different windows or steps.
        ValueError: a count is negative or not finite.
    """
    if totals.windows_differ or totals.optimizer_steps_differ:
        positions = comm.all_gather_object(position)
        places = "; ".join(f"rank {r}: {w} windows, {s} steps" for r, (w, s) in enumerate(positions))
        raise RuntimeError(
            f"ranks are not at the same place ({places}): some rank abandoned a window that was already reduced, "
            "or stepped without the others. Restore all ranks from one checkpoint"
        )
    if totals.invalid_counts:
        problems = comm.all_gather_object(local.problems())
        places = "; ".join(f"rank {r}: {text}" for r, texts in enumerate(problems) for text in texts)
        raise ValueError(
            f"{places}: count must be finite{'' if local.terms is None else ', whole'} and not negative (0 leaves a "
            "micro-batch out of the divisor). "
            "Nothing was stepped; call sync.abandon() and go on"
        )
