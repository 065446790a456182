"""The outcomes of reduced windows (verdicts), with errors that are the same on every rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Unbroken
from pyengine.ops.device import Readback, flush, is_lazy
from pyengine.window.digest import Use, difference
from pyengine.window.faults import FaultKind
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header, LocalWindow, Totals
from pyengine.window.nonfinite import RankFindings, describe

_log = logging.getLogger("pyengine.window")

# Returns the micro-batches in which a parameter's gradient was nonfinite on this rank, or None if
# micro-batches were not checked.
Blame = Callable[[int], list[int] | None]


def call_all(actions: Sequence[Callable[[], object]]) -> None:
    """Call every action in order; raise an exception only after all actions have been called."""
    for index, action in enumerate(actions):
        try:
            action()
        except BaseException:
            call_all(actions[index + 1 :])
            raise


@dataclass(frozen=True)
class WindowReport:
    """What one rank knows about its window: counts, errors and parameter names."""

    index: int  # Index of the window.
    local: LocalWindow  # Counts, losses and errors of this rank.
    names: Sequence[str]  # Parameter names, in registration order.
    blame: Blame
    acted: Callable[[], str] = str  # Returns how a metric changed the window, as text; '' if none did.
    is_scaled: bool = False  # Whether the window's losses were scaled.
    has_backward: bool = False  # Whether a backward is known to have run in the window.
    has_gradient: bool = True  # Whether any parameter has a gradient, as far as the host knows.


@dataclass(frozen=True)
class Outcome:
    """Device tensors that describe a reduced window."""

    # The reduced header (float64), followed by three flags: the step is skipped, the norm is 0, and a metric
    # has skipped or clipped the window.
    numbers: Tensor
    nonfinite: Tensor  # uint8 `[parameters]`: a copy, so that the next window can overwrite the flags

    @classmethod
    def of(cls, header: Header, final: FinalPass) -> Outcome:
        # If the norm is exactly 0, `reach` gathers from all ranks whether any rank has a gradient.
        is_zero = (final.grad_norm() == 0).double()
        flags = [final.found_inf.double().view(1), is_zero.view(1), final.acted.view(1)]
        return cls(torch.cat([header.vector(), *flags]), final.nonfinite.clone())


class Verdict:
    """The outcome of one reduced window.

    The device knows immediately whether the step is allowed (`FinalPass.found_inf`). The host reads the
    outcome in `reach`, which waits for the device. Every rank calls `reach` at the same point of its program,
    because `reach` launches a collective if the window has failed. See [Note: order of collectives in a
    window] in engine/engine.py.
    """

    def __init__(
        self, header: Header, outcome: Outcome, report: WindowReport, *, comm: Comm, raises: bool
    ) -> None:
        self.totals: Totals | None = None  # Sums over all ranks; None until read.
        # The reason why the window was skipped or clipped; empty otherwise.
        self.reason = ""
        self.outcome, self.report = outcome, report
        self._header, self._comm, self._raises = header, comm, raises
        self._numbers = Readback(outcome.numbers)
        self._waiting: list[Callable[[Totals, bool], None]] = []
        self._waiting_to_know: list[Callable[[bool], None]] = []
        self.skips = self._is_zero = self._has_acted = False
        self.is_reached = False  # Whether the ranks have agreed on the outcome.
        self.is_awaited = False  # Whether an action on this rank waits for the outcome.
        self.use = Use()  # How this rank has used the gradients of the window.

    def then(self, action: Callable[[Totals, bool], None], *, awaits: bool = True) -> None:
        """Call `action(totals, skipped)` when ranks have agreed on the outcome, or now if they already have.

        Args:
            action: the callback.
            awaits: whether to read the numbers for this action even if reading them has a cost.
        """
        self.is_awaited = self.is_awaited or awaits
        if self.is_reached:
            assert self.totals is not None
            action(self.totals, self.skips)
        else:
            self._waiting.append(action)

    def once_known(self, action: Callable[[bool], None]) -> None:
        """Call `action(skipped)` as soon as this rank knows the outcome, without waiting for other ranks."""
        self.is_awaited = True
        if self.totals is None:
            self._waiting_to_know.append(action)
        else:
            action(self.skips)

    @property
    def error(self) -> Exception | None:
        """The error on which ranks have agreed and which `reach` raises, or None."""
        faults = self.report.local.faults
        return next((fault.error for fault in faults if fault.error is not None), None) if faults else None

    @property
    def was_refused(self) -> bool:
        """Whether ranks are known to have disagreed in the header."""
        totals = self._header.known_totals if self.totals is None else self.totals
        return totals is not None and totals.differ

    @property
    def is_good(self) -> bool:
        return self.totals is not None and not self.skips

    @property
    def is_quiet(self) -> bool:
        """Whether this rank knows the outcome, and needs no collective to agree with other ranks."""
        return self.is_good and not self._is_zero and not self._has_acted

    def reach(self) -> Totals:
        """Wait for the outcome and call the waiting actions; later calls return or raise the same result.

        A valid window needs no collective; in a failed window ranks gather error information.
        """
        totals = self._look() if self.totals is None else self.totals
        if self.is_reached and not (self._waiting or self._waiting_to_know or self.report.local.faults):
            return totals
        if not self.is_reached and not (self.skips or self._is_zero or self._has_acted):
            self.is_reached = True  # no collective is needed
        if not self.is_reached:
            with Unbroken(self._comm):
                try:
                    self._judge(totals)
                except (ValueError, RuntimeError, FloatingPointError) as error:
                    error = error.with_traceback(None)  # a traceback would keep every frame alive
                    self.report.local.faults.note(FaultKind.CONCLUDED, str(error), error)
                self.is_reached = True
        concluded, actions = self.error, self._pop_waiting_to_know()
        waiting, self._waiting = self._waiting, []
        if concluded is None:
            actions += [partial(action, totals, self.skips) for action in waiting]
        if actions:
            call_all(actions)
        _log.debug("window %d: verdict %s", self.report.index, concluded or self.reason or "step")
        if concluded is not None:
            raise type(concluded)(*concluded.args)
        return totals

    def read(self) -> Totals:
        """Wait for this rank's numbers without a collective; the ranks may not have agreed on them."""
        totals = self._look()
        call_all(self._pop_waiting_to_know())
        return totals

    def warn_of_skip(self, in_a_row: int) -> None:
        """Warn that the step was skipped, and state the reason."""
        which = "the step was" if in_a_row == 1 else f"the last {in_a_row} steps were"
        stops = "" if self._has_acted else "; nonfinite='raise' raises an error at the first"
        warnings.warn(
            f"window {self.report.index}: {which} skipped on every rank: {self.reason}. sync.on_step "
            f"reports every skipped step{stops}",
            stacklevel=2,
        )

    def _look(self) -> Totals:
        if self.totals is None:
            *numbers, found_inf, is_zero, has_acted = self._numbers.get()
            self.skips, self._is_zero, self._has_acted = found_inf != 0, is_zero != 0, has_acted != 0
            self.totals = self._header.known_totals or Totals.of(numbers, self._comm.world_size)
            _log.debug("window %d: skip %s, %s", self.report.index, self.skips, self.totals)
        return self.totals

    def _pop_waiting_to_know(self) -> list[Callable[[], object]]:
        """Remove and return the actions that wait until this rank knows the outcome."""
        if not self._waiting_to_know:
            return []
        waiting, self._waiting_to_know = self._waiting_to_know, []
        return [partial(action, self.skips) for action in waiting]

    def _judge(self, totals: Totals) -> None:
        if self.skips:
            check_agreement(self._header, totals, self._comm)
        if self._has_acted:  # metrics act only on windows that are otherwise valid
            self.reason = self.report.acted()
            return
        if not self.skips:
            if self._is_zero:
                self._refuse_empty()
            return
        report = self.report
        check_counts(totals, self._comm, local=report.local)
        most = report.local.max_micro_batches
        if totals.micro_batches > most:
            raise ValueError(
                f"window of {totals.micro_batches} micro-batches over all ranks, but accumulator='exact' was "
                f"created for at most {most}, so its integers may overflow. No optimizer has stepped; pass "
                f"the size of the window: pe.Exact(micro_batches={totals.micro_batches})"
            )
        if totals.count == 0:
            self.reason = "count is 0 on every rank: nothing to average over"
            return
        self.reason = self._why_not_finite()
        if self._raises:
            raise FloatingPointError(f"window {self.report.index}: {self.reason}")

    def _refuse_empty(self) -> None:
        """Raise RuntimeError if any backward has run, but no rank has a gradient."""
        mine = self.report.has_backward, self.report.has_gradient
        backwards, gradients = zip(*self._comm.all_gather_object(mine), strict=True)
        if any(backwards) and not any(gradients):
            raise RuntimeError(
                f"window {self.report.index}: no rank has any gradient, so nothing was trained. Create the "
                "engine (and the optimizer) from the parameters that the loss depends on, after any code "
                "that replaces them (load_state_dict(assign=True), swap_tensors, a parametrization), and "
                "remove any code that clears gradients inside the backward (an optimizer in a hook, "
                ".grad = None, another engine or accelerator). Call sync.abandon() on all ranks and continue"
            )

    def _why_not_finite(self) -> str:
        """Gather the findings of every rank, and describe where inf and nan came from.

        Raises:
            ValueError: a rank sent inf or nan on purpose, because it found an error after the header.
        """
        report = self.report
        nonfinite = self.outcome.nonfinite.nonzero().flatten().tolist()
        blamed = {report.names[param]: report.blame(param) for param in nonfinite}
        local = report.local
        gave_up = local.faults.first(FaultKind.GAVE_UP)
        mine = RankFindings(gave_up, local.nonfinite_losses(), blamed, local.faults.refusals())
        findings: Sequence[RankFindings] = self._comm.all_gather_object(mine)
        raise_refusals([each.refusals for each in findings])
        return describe(findings, is_exact=report.local.is_exact)


# ---- outcomes of several windows ----


# On a lazy device the host reads outcomes only if an action waits for them, or after this many windows.
MAX_UNREAD = 64
# The numbers of consecutive skipped steps at which to warn again.
_WARN_AT = {10**power for power in range(1, 12)}


class VerdictQueue:
    """The outcomes (verdicts) of reduced windows, in order, each kept until ranks have agreed on it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_lazy = device, is_lazy(device)
        self._last: Verdict | None = None
        # The outcome of the previous window, kept until it is known whether ranks have refused the last
        # window.
        self._before: Verdict | None = None
        self._unread: list[Verdict] = []
        # The number of optimizer steps that changed parameters, in windows on whose outcome ranks have
        # agreed.
        self.steps_taken = self._new_steps = 0
        self._skipped = 0  # number of consecutive skipped windows
        self._has_warned = False

    def append(self, verdict: Verdict) -> None:
        """Append the outcome (verdict) of a window that was just reduced.

        Ranks do not compare how they used a refused window, even if the refusal becomes known only later.
        """
        self._before, self._last = self._last_of_all_ranks(), verdict
        self._unread.append(verdict)

    def forget(self, verdict: Verdict) -> None:
        """Remove `verdict`, whose window has not run, if it was appended last."""
        if self._unread and self._unread[-1] is verdict:
            self._unread.pop()
            self._last, self._before = self._before, None

    def count_step(self) -> None:
        """Count the optimizer step of the last reduced window, unless the device has skipped the step."""
        assert self._last is not None
        self._last.then(self._count, awaits=False)

    def reach_all(self) -> None:
        """Read all outcomes and raise their errors; every rank calls this at the same point."""
        if self._is_lazy:
            flush(self._device)
        while self._unread:
            self._reach_next()
        if self._before is not None:
            self._last, self._before = self._last_of_all_ranks(), None
        self.steps_taken, self._new_steps = self.steps_taken + self._new_steps, 0

    def reach_earlier(self, window: int) -> None:
        """Read earlier outcomes; on a lazy device, only if needed or once every `MAX_UNREAD` windows."""
        if not self._is_lazy or window % MAX_UNREAD == 0:
            self.reach_all()
        elif any(verdict.is_awaited for verdict in self._unread):
            self.read_all()
            while self._unread and self._unread[0].is_quiet:
                self._reach_next()

    def last_use(self) -> Use:
        """Return how this rank used the previous window; empty for an invalid window or a lazy device.

        Call this after `reach_earlier`, so that all ranks know whether the window was valid.
        """
        last = self._last_of_all_ranks()
        return last.use if last is not None and last.is_good and not self._is_lazy else Use()

    def restart(self, steps_taken: int) -> None:
        """Resume after `steps_taken` optimizer steps, and discard the outcomes of earlier windows."""
        self.steps_taken, self._last, self._before, self._skipped = steps_taken, None, None, 0

    def read_all(self) -> None:
        """Read the outcomes of all reduced windows, without a collective, and step this rank's schedulers."""
        for verdict in self._unread:
            verdict.read()

    def some_rank_has_more(self) -> bool:
        """Whether any rank has a window after the last reduced window; waits for the last header."""
        last = self._last_of_all_ranks()
        return last is not None and last.read().more > 0

    def _reach_next(self) -> None:
        """Agree on the earliest outcome, and warn about skipped steps.

        Warns about the first skipped step, unless a loss scale may have caused it, and about the 10th,
        100th, ... consecutive skipped step.
        """
        verdict = self._unread.pop(0)
        verdict.reach()
        self._skipped = self._skipped + 1 if verdict.skips else 0
        is_first = verdict.skips and not (self._has_warned or verdict.report.is_scaled)
        if is_first or self._skipped in _WARN_AT:
            verdict.warn_of_skip(self._skipped)
            self._has_warned = True

    def _last_of_all_ranks(self) -> Verdict | None:
        """Return the outcome of the last window that is not known to have been refused."""
        return self._before if self._last is not None and self._last.was_refused else self._last

    def _count(self, _: Totals, skips: bool) -> None:
        self._new_steps += not skips


def check_agreement(header: Header, totals: Totals, comm: Comm) -> None:
    """Raise RuntimeError on every rank if ranks have different positions or digests."""
    if totals.differ:
        header.disagreement = _disagreement(header, comm)
        raise RuntimeError(header.disagreement)


def _disagreement(header: Header, comm: Comm) -> str:
    positions, described, accumulate = _gather_digests(header, comm)
    unlike = f". accumulate={list(accumulate)} by rank" if len(set(accumulate)) > 1 else ""
    if unlike:
        unlike += (
            ": ranks end windows after different numbers of micro-batches, which only sync.windows supports"
        )
    if len({digest["engine"] for digest in described}) == 1 and len(set(positions)) > 1:
        places = "; ".join(f"rank {r}: {w} windows, {s} steps" for r, (w, s) in enumerate(positions))
        return (
            f"ranks are not at the same place ({places}): a rank abandoned a window that was already "
            f"reduced, or stepped without the other ranks. Restore all ranks from one checkpoint{unlike}"
        )
    return difference(described) + unlike


def check_stage(header: Header, comm: Comm) -> None:
    """Raise RuntimeError on every rank unless all ranks are at the same stage of the same engine.

    The positions of the ranks may differ.
    """
    if not header.totals().differ:
        return
    _, described, _ = _gather_digests(header, comm)
    if len({(digest["engine"], digest["stage"]) for digest in described}) > 1:
        raise RuntimeError(difference(described))


def _gather_digests(
    header: Header, comm: Comm
) -> tuple[tuple[tuple[int, int], ...], tuple[dict[str, str], ...], tuple[int, ...]]:
    """Return the positions, the described digests and the values of `accumulate`, each by rank."""
    mine = header.position, header.digest.describe(), header.digest.accumulate
    positions, described, accumulate = zip(*comm.all_gather_object(mine), strict=True)
    return positions, described, accumulate


def check_counts(totals: Totals, comm: Comm, *, local: LocalWindow) -> None:
    """Raise ValueError on every rank if any rank has an invalid count or an error for this window."""
    if totals.batches_differ:
        gathered = comm.all_gather_object(local.described())
        listed = [f"rank {rank}, {text}" for rank, text in enumerate(gathered)]
        raise ValueError(
            f"ranks that share a batch have different counts: {'; '.join(listed)}. Give each of these ranks "
            "the same micro-batches with the same counts (create the sampler with the rank and the number of "
            "ranks along the axes that count), or name the axes along which each rank counts its own items: "
            "pe.Axes(count=...). No optimizer has stepped; call sync.abandon() on all ranks and continue"
        )
    if totals.is_unscaled:
        raise ValueError(
            "sync.scaler is set, but no rank that shares a batch has scaled a loss: on the rank that has the "
            "loss, call sync.scaler.scale(loss).backward(), or mb.backward(loss), which scales the loss. "
            "No optimizer has stepped; call sync.abandon() on all ranks and continue"
        )
    if totals.invalid_counts:
        gathered = comm.all_gather_object((local.problems(), local.faults.all_refusals()))
        raise_refusals([texts for _, texts in gathered])
        places = by_rank([texts for texts, _ in gathered])
        raise ValueError(
            f"count must be finite{', whole' if local.is_exact else ''} and not negative, and at most 2**53 "
            f"(0 leaves a micro-batch out of the divisor), but {places}. Pass the number of items in the "
            "loss of that micro-batch, for example (labels != -100).sum(). No optimizer has stepped; call "
            "sync.abandon() on all ranks and continue"
        )


def raise_refusals(gathered: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if any rank has an error for this window; `gathered` has the errors by rank."""
    if refusals := by_rank(gathered):
        raise ValueError(
            f"{refusals}. sync.step has not stepped an optimizer in this window: fix this, then call "
            "sync.abandon() on all ranks. (Otherwise the error recurs in the next window)"
        )


def by_rank(gathered: Sequence[Sequence[str]]) -> str:
    """Join the texts of all ranks; a text shared by several ranks appears once, after these ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, texts in enumerate(gathered):
        for text in dict.fromkeys(texts):
            ranks_of.setdefault(text, []).append(rank)
    named = []
    for text, ranks in ranks_of.items():
        who = "all ranks" if len(ranks) == len(gathered) else f"ranks {', '.join(map(str, ranks))}"
        named.append(f"{f'rank {ranks[0]}' if len(ranks) == 1 else who}: {text}")
    return "; ".join(named)
