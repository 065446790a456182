"""One window in the order in which it happens: begin, micro-batches, send, land, conclude, step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyengine.audit.finding import AuditError
from pyengine.engine.checkpoint.snapshot import Snapshot
from pyengine.engine.parts import Parts
from pyengine.gradients.slots import Saved
from pyengine.ops.device import HOST, Readback, flush, is_lazy
from pyengine.ops.trace import span
from pyengine.step.clock import Clock
from pyengine.step.step_record import StepCallback, StepRecord
from pyengine.window.callbacks import call_all
from pyengine.window.claims import OptimizerStep
from pyengine.window.counter import State
from pyengine.window.denominators import Denominators
from pyengine.window.header import Header, Totals
from pyengine.window.runs import Runs
from pyengine.window.verdict import Evidence, Verdict


class OpenWindow:
    """One window, made when it opens and dropped when the next one does; its methods stand in their order.

    The counter's state tells which comes next: OPEN (`begin` and a `MicroBatch`, `send`), SENT (`land`),
    LANDED (`step`), USED.

    Args:
        parts: what it shares with the others.
        resumed: the snapshot to go on from, whose sums the first backward loads.

    Attributes:
        resumed: as given, until then.
        counts: this rank's counts and losses.
        runs: its runs of micro-batches, each of which is accumulated once.
        denominators: what its losses are means over, if that was read ahead; else None.
        has_more_windows: whether another window follows, as far as this rank knows.
        is_padding: whether the micro-batch handed out last is padding: its loss and count are not noted.
        header: None until it is sent.
        verdict: the outcome, None until it has landed; the host may not know it yet.
        unusable: what makes the window unusable on this rank, found after it was sent; empty if nothing.
        gave_up: the exception that ended its last backward, as text; empty if none did.
        is_scale_updated: whether the loss scale has followed its outcome.
        has_backward: whether a backward has run in it on this rank, as far as that is known.
    """

    clock: Clock

    def __init__(self, parts: Parts, resumed: Snapshot | None = None) -> None:
        self._parts, self.resumed = parts, resumed
        self.counts = parts.new_counts()
        self.runs = Runs(parts.run, done=0 if resumed is None else len(resumed.places))
        if resumed is not None:
            self.counts.is_silent = True  # whether it was is not saved
            told = [
                None if loss is None else torch.tensor(loss, dtype=torch.float64, device=HOST)
                for loss in resumed.losses
            ]
            dropped = resumed.dropped or [False] * len(told)
            for loss, count, is_dropped in zip(told, resumed.counts, dropped, strict=True):
                self.counts.append(loss, count, is_dropped=is_dropped)
        self.has_more_windows = self.is_scale_updated = self._has_begun = self.is_padding = False
        self.has_backward = self._is_sending = False
        self.denominators: Denominators | None = None
        self.header: Header | None = None
        self.verdict: Verdict | None = None
        self.gave_up = self.unusable = ""
        self._traffic = (parts.comm.traffic.collectives, parts.comm.traffic.bytes_sent)
        parts.final.reset()

    def begin(self) -> None:
        """Start with sums of zero, or with those that were loaded; before every micro-batch, and before what
        is sent without one. Refuse what somebody else has done to gradients since the engine looked last.
        """
        parts = self._parts
        if self._has_begun:
            self.look()
            return
        self._look_back()
        self.clock = Clock(parts.device)
        parts.kept_grads.keep()
        parts.reducer.begin()
        if parts.dropping is not None:
            parts.dropping.begin()
        self._has_begun = True
        if parts.audit is not None:
            parts.audit.begin(parts.counter.index, is_whole=self.resumed is None)
        if self.resumed is not None:
            parts.reducer.load(self.resumed.sums, done=len(self.resumed.places))
            self.resumed = None
        parts.marks.take()
        parts.marks.watch_hooks(self._refuse_taken)

    def look(self) -> None:
        """Refuse the window if somebody else has written to its gradients since the last micro-batch."""
        is_open = self._has_begun and self._parts.counter.state is State.OPEN
        if is_open and (found := self.written_past()):
            self.refuse(found[0])
            self._parts.marks.take()

    def refuse(self, text: str) -> None:
        """Let no rank use this window; what is found only after it was sent, this rank alone.

        Args:
            text: why.

        Raises:
            RuntimeError: it has been sent.
        """
        if self._parts.counter.state is State.OPEN:
            self.counts.refusals.append(text)
        else:
            self.unusable = (
                f"{text}. This rank cannot use the window: call sync.abandon() on every rank and go on. (A "
                "rank on which it did not happen may have stepped: the next header says so)"
            )
            raise RuntimeError(self.unusable)

    def _refuse_taken(self, text: str, param: Tensor) -> None:
        """Refuse the window for what a hook has done in one of its backwards.

        Where the header has gone, nan in place of the gradient voids the window on every rank, and the
        verdict raises why.
        """
        if self._is_sending:
            self.counts.refusals.append(text)
            param.grad = torch.full_like(param, torch.nan)
        elif self._parts.counter.state in (State.OPEN, State.SENT):
            self.refuse(text)

    def end_run(self) -> None:
        """Accumulate what is left of a run that gets no further micro-batch."""
        if self.runs.is_open:
            self._parts.reducer.collect()
            self.runs.end()

    def save(self) -> Saved:
        """Return what this window's micro-batches have left, as `Reducer.save`, with flags by micro-batch."""
        saved = self._parts.reducer.save()
        for parts in saved.values():
            if "nonfinite" in parts:
                parts["nonfinite"] = self.runs.spread(parts["nonfinite"])
        return saved

    def send(self) -> None:
        """Send what has been accumulated, without a backward."""
        self.end_run()
        with self.clock.phase("exposed_sync"), self.sending() as header:
            self._parts.reducer.reduce(header)
        self._parts.marks.take()

    @contextmanager
    def sending(self) -> Iterator[Header]:
        """Send the header, for the body to send the buckets."""
        parts = self._parts
        parts.reducer.before_header()
        # The previous window's, if the host has let it run ahead: this header tells of its step. Here, behind
        # every collective that a forward may launch, all ranks are at the same point.
        parts.verdicts.reach_earlier(parts.counter.index)
        if self.denominators is not None:
            counter = parts.counter
            self.counts.refusals += self.denominators.problems(counter.done, handed=counter.handed)
        self.header = header = parts.send_header(
            self.counts, more=self.has_more_windows, stage="sends a window"
        )
        parts.batch_norms.stop_counting()
        parts.counter.state = State.SENT
        self._is_sending = True
        try:
            yield header
        except BaseException as error:
            self.gave_up = repr(error)
            parts.reducer.give_up()
            parts.batch_norms.start_exchange(parts.comm, header)
            raise
        finally:
            self._is_sending = False
        parts.batch_norms.start_exchange(parts.comm, header)

    def land(self) -> Verdict:
        """Publish the mean as `.grad` on the device, and decide there whether it may be used; once.

        The verdict is the same on every rank. The host waits for the collectives where these are not ordered
        by a stream.
        """
        parts = self._parts
        if self.verdict is None:
            assert self.header is not None  # the counter says SENT
            changed = parts.marks.changed()
            with self.clock.phase("exposed_sync"):
                parts.reducer.finish(parts.final)
                if parts.audit is not None:
                    parts.audit.sample(parts.scaler)
                grads = (param.grad for param in parts.reducer.params)
                has_gradient = is_lazy(parts.device) or any(grad is not None for grad in grads)
                if parts.kept_grads.is_pending:
                    parts.kept_grads.add()
                    parts.published.read(parts.final)
                parts.final.compute_norm(is_refused=self.header.is_refused())
                parts.batch_norms.wait()
            self.verdict = self._conclude(self.header, has_gradient=has_gradient)
            if not self.header.was_refused:
                parts.reducer.residuals.settle(parts.final.found_inf)
            parts.counter.state = State.LANDED
            parts.verdicts.append(self.verdict)
            if parts.scaler is not None:
                parts.scaler.has_scaled = False
            self._audit(self.header)
            if changed:
                with suppress(RuntimeError):  # `Engine.finish` raises it, behind what ranks conclude together
                    self.refuse(parts.marks.described(changed, "behind the window's end"))
            parts.published.mark()
        return self.verdict

    def _audit(self, header: Header) -> None:
        """Let the window not be used where ranks have parted.

        Raises:
            AuditError: they have; on every rank.
        """
        audit = self._parts.audit
        if audit is not None and not header.was_refused:
            try:
                audit.check(self.counts, header, self._parts.final)
            except AuditError as error:
                self.unusable = f"{error}. Nothing was stepped; call sync.abandon(), or restore a checkpoint"
                raise

    def renew_norm(self, *, has_changed: bool = False) -> None:
        """Take the norm again if gradients were written to, or replaced, since it was taken.

        Args:
            has_changed: whether it is known that they were.

        Cost: a look at every `.grad`, and a read of each if one has changed; then `FinalPass.renew_norm`.
        """
        parts = self._parts
        if has_changed := has_changed or parts.published.has_changed():
            parts.published.read(parts.final)
            parts.published.mark()
        parts.final.renew_norm(was_read=has_changed)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        claim: tuple[OptimizerStep, Sequence[Tensor]],
        stepped: Collection[int],
        callbacks: Collection[StepCallback],
    ) -> Tensor:
        """Let an optimizer use the gradients, unless they were not finite on some rank.

        Args:
            optimizer: over parameters of this engine.
            scheduler: stepped once it is known that the optimizer was; or None.
            claim: what this step does, and 0-dim tensors that must be alike on every rank; kept, unread,
                until the next header.
            stepped: the engine's parameters that the optimizer holds, by index.
            callbacks: called with the record of the window's first step, in order.

        Returns:
            Whether the parameters changed, bool, 0-dim, on their device; the same on every rank.
        """
        parts, verdict = self._parts, self.verdict
        assert verdict is not None  # it has landed
        if parts.audit is not None:
            parts.audit.look_at(optimizer)
        done, alike = claim
        norm = parts.final.norm_before_clipping()
        try:
            with span("optimizer"):
                parts.reducer.stepper.step(optimizer, parts.final)
        except BaseException:
            # It may have changed parameters: a rank that steps it again is found out.
            verdict.use.steps.append(replace(done, name=f"{done.name}, which raised,"))
            raise
        finally:
            self.follow_scale()
        has_stepped = parts.final.found_inf == 0
        report = None if parts.counter.state is State.USED else self._report(verdict, norm, callbacks)
        self._use(verdict, done, [parts.final.clipped, *alike], stepped)
        # The window has been used, whatever the user's own code does from here on.
        actions: list[Callable[[], None]] = []
        if scheduler is not None:
            actions.append(partial(verdict.once_known, lambda skips: None if skips else scheduler.step()))
        if report is not None:
            actions.append(partial(verdict.then, report, awaits=bool(callbacks)))
        call_all(actions)
        return has_stepped

    def follow_scale(self) -> None:
        """Let the loss scale follow the outcome, once, and what wires keep with it."""
        parts, scaler = self._parts, self._parts.scaler
        if scaler is None or self.is_scale_updated:
            return
        before = scaler.current_scale()
        scaler.follow()
        self.is_scale_updated = True
        if parts.reducer.residuals.is_kept:
            parts.reducer.residuals.scale_(scaler.current_scale() / before)

    def _look_back(self) -> None:
        """Refuse the window if a gradient came since the last one, and was not zeroed: it would be lost."""
        if found := self.written_past():
            text, is_more_than_zeros = found
            if isinstance(is_more_than_zeros, Tensor):
                self.counts.doubts.append((text, is_more_than_zeros))
            else:
                self.counts.refusals.append(text)

    def written_past(self) -> tuple[str, bool | Tensor] | None:
        """Say which gradients were written past the engine since it looked last.

        Returns:
            None where none were; else the text of a refusal, and whether it holds: True or a bool, 0-dim,
            unread, since between windows gradients may be zeroed.
        """
        parts = self._parts
        if self._has_begun and parts.counter.state is State.OPEN:
            changed = parts.marks.changed()
            return (parts.marks.described(changed, "between micro-batches"), True) if changed else None
        if strays := parts.marks.strays():
            return parts.marks.described(strays, "between windows"), True
        if parts.reducer.has_moved or is_lazy(parts.device):
            return None
        # What no optimizer has used is the user's to change: it counts into this window.
        changed = [index for index in parts.marks.written() if not parts.kept_grads.keeps(index)]
        found = parts.marks.hold(changed)
        return None if found is None else (parts.marks.described(changed, "between windows"), found)

    def _conclude(self, header: Header, *, has_gradient: bool) -> Verdict:
        """Decide on the device whether the window may be used, and keep what tells the host why not."""
        parts, final = self._parts, self._parts.final
        final.forbid(header.forbids())
        reducer = parts.reducer
        dropped: Callable[[], dict[int, list[str]]] = dict
        if parts.dropping is not None:
            final.back_off(header.has_dropped())
            dropped = parts.dropping.reports()
        evidence = Evidence(
            parts.counter.index,
            self.counts,
            self.gave_up,
            reducer.names,
            self.runs.blame(reducer.blame()),
            dropped,
            parts.scaler is not None,
            self.has_backward,
            has_gradient,
        )
        return Verdict(header, final, evidence, comm=parts.comm, raises=parts.raises)

    def _use(
        self, verdict: Verdict, step: OptimizerStep, factors: Sequence[Tensor], stepped: Collection[int]
    ) -> None:
        """Note that an optimizer has used gradients of the window: those start from zero in the next one."""
        parts = self._parts
        # On a lazy device nobody looks, and what is kept would be one more output of the program.
        if not is_lazy(parts.device):
            verdict.use.steps.append(step)
            verdict.use.factors += factors
        if parts.counter.state is not State.USED:
            parts.batch_norms.apply(parts.final.found_inf == 0)
            parts.verdicts.count_step()
        parts.counter.state = State.USED
        parts.kept_grads.use(stepped, parts.final.found_inf)
        parts.marks.take()
        flush(parts.device)

    def _report(
        self, verdict: Verdict, norm: Tensor, callbacks: Collection[StepCallback]
    ) -> Callable[[Totals, bool], None]:
        """Stop the clock, and return what makes this window's record once the numbers are known."""
        parts, clock = self._parts, self.clock
        collectives = parts.comm.traffic.collectives - self._traffic[0]
        sent = parts.comm.traffic.bytes_sent - self._traffic[1]
        # Also without callbacks: ranks whose programs differ cannot meet.
        index, grad_norm = parts.counter.index, Readback(norm.reshape(1))
        clock.stop()

        def emit(totals: Totals, skips: bool) -> None:
            if not callbacks:
                return  # the seconds would wait for the device
            record = StepRecord(
                step=index,
                micro_batches=totals.micro_batches,
                count=totals.count,
                loss=totals.loss / totals.count if totals.count and not totals.untold_losses else None,
                grad_norm=grad_norm.get()[0],
                skipped=skips,
                reason=verdict.reason,
                bytes_on_wire=sent,
                collectives=collectives,
                backward_s=clock.seconds("backward"),
                exposed_sync_s=clock.seconds("exposed_sync"),
                step_s=clock.elapsed(),
                held_bytes=parts.reducer.held_bytes,
                dropped=totals.dropped,
            )
            call_all([partial(callback, record) for callback in callbacks])

        return emit
