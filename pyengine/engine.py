"""One window's life: gradients accumulate, are sent, land, and are used by a step, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyengine.agreement import Settings, Shares
from pyengine.batch_norm import BatchNormReplay
from pyengine.carry import Carry
from pyengine.comm import Transport
from pyengine.header import Count, Header
from pyengine.host import runs_ahead
from pyengine.norm import FinalPass, GradScaler
from pyengine.outcomes import Outcomes
from pyengine.record import Clock
from pyengine.reducer import Reducer
from pyengine.seed import set_rng_states
from pyengine.snapshot import Snapshot, identify
from pyengine.verdict import Evidence, Verdict
from pyengine.window import State, Window


class Engine:
    """The state machine behind `GradSync` and `attach`.

    Attributes:
        window: the counter.
        final: what is still to be multiplied into the gradients, their norm and finite flags.
        verdict: the outcome of the current window, once it has landed; the host may not know it yet.
        is_late: whether the host lets the device run ahead, and learns of a window's outcome in the next one.
        outcomes: of this window and earlier ones, and the steps taken.
        carry: gradients that the caller keeps from one window to the next.
        identity: what a state has to fit.
        terms: the most micro-batches that an exact sum may take; None for other sums.
        shares: how a full window is dealt out.
        resumed: what was loaded and is still to be taken in, by the first backward.
        more: whether another window follows the current one, as far as this rank knows.
        is_between_loops: whether a loop over `windows` has run out and no other one has begun.
        local: this rank's counts and losses of the window.
        norms: the replay of running statistics.
    """

    def __init__(
        self,
        reducer: Reducer,
        comm: Transport,
        settings: Settings,
        norms: BatchNormReplay,
        *,
        shares: Shares,
    ) -> None:
        self.reducer, self.comm, self.norms = reducer, comm, norms
        self.shares = shares
        self.window = Window(settings.accumulate, share=shares.places[comm.rank])
        self._raises = settings.nonfinite == "raise"
        self.terms = shares.terms if settings.kind == "exact" else None
        self.device = reducer.params[0].device
        self.identity = identify(settings.kind, self.terms, norms.num_modules, reducer.names, reducer.params)
        self.final = FinalPass(len(reducer.params), self.device)
        self.clock = Clock(self.device)
        self.is_late = not self._raises and runs_ahead(self.device)
        self.verdict: Verdict | None = None
        self.outcomes = Outcomes(comm, self.device)
        self.carry = Carry(reducer.names, reducer.params)
        self._opened_at = -1
        self.scaler: GradScaler | None = None
        self.is_between_loops = False
        self.is_used = False
        self.resumed: Snapshot | None = None
        self._rng: dict[str, Any] = {}
        self._reset()
        comm.launch()

    def open(self) -> None:
        """Begin a window, or take up the one that was resumed; the previous one must have been used."""
        if self.window.is_resumed:
            self.window.take_up()
        else:
            self.retire()
            self._reset()
            self._opened_at = self.window.index
            self.window.open()
        self.reducer.open()
        self.norms.open()
        if self.resumed is not None:
            self.norms.load(self.resumed.places, self.resumed.batch_norm)
        if self._rng:
            set_rng_states(self._rng)
            self._rng = {}

    def hand_out(self, place: int, *, last: bool, more: bool) -> None:
        """Count a micro-batch given to the loop; `more` says that another window follows the current one."""
        self.window.hand_out(place, last=last)
        self.more = more
        self.norms.hand_out(place)
        self.reducer.before_forward(syncs=last)

    def backward(self, loss: Tensor, count: Count) -> None:
        """Run one micro-batch's backward; the window's last one also sends the gradients."""
        syncs = self.window.next_backward_syncs
        index = self.window.count_backward()
        self.local.take(loss, count)
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        self._begin()
        due = self.window.done < self.window.handed
        with self.clock.phase("backward"), self.norms.backward(due=due):
            if syncs and self.reducer.overlaps:
                self._send(scaled.backward, scaled)
                return
            self.reducer.add(index, scaled.backward)
            if syncs:
                self._send(None, None)

    def exhaust(self) -> None:
        """Note the end of the window's loop; backwards that are still due may follow."""
        self.window.is_exhausted = True
        if self.window.state is State.SYNCED:
            self.finish()

    def flush(self) -> None:
        """Send what has been accumulated, without a backward. Does nothing if the window has been sent."""
        if self.window.state is State.IDLE:
            raise RuntimeError(
                "flush outside a window: there is nothing to send; open one with sync.windows(loader)"
            )
        if self.window.is_resumed:
            self.open()
        if self.window.state is State.OPEN:
            self._begin()
            with self.clock.phase("exposed_sync"):
                self._send(None, None)

    def finish(self) -> Verdict:
        """Let the window land: `.grad` is published on the device, and the host learns the outcome unless it is late.

        Raises, on every rank, what any rank got wrong; late that happens at the next `settle`.
        """
        if self.window.state is State.OPEN and self.window.is_exhausted:
            self.flush()  # some micro-batches had no backward
        if self.window.state is not State.SYNCED:
            raise RuntimeError(
                f"no synchronised gradients: {self.window.state.value} "
                f"({self.window.done} of {self.window.accumulate} backwards done). "
                "Finish the window, or call sync.flush() to end it here"
            )
        if self.verdict is None:
            assert self._header is not None
            with self.clock.phase("exposed_sync"):
                self.reducer.finish(self._header, self.final)
                self.norms.land()
            self.verdict = self._conclude(self._header)
            self.outcomes.add(self.verdict)
        if not self.is_late:
            self.settle()
        return self.verdict

    def settle(self) -> None:
        """Learn the outcome of every window that landed; every rank calls this at the same point."""
        self.outcomes.settle()
        if self.verdict is not None:
            self.verdict.reach()  # raises again what was wrong with it

    def others_go_on(self) -> bool:
        """Whether another rank still needs this one: for a window that was dropped before it was sent, or further ones."""
        return self.window.index == self._opened_at or self.outcomes.announce_more()

    def write(self) -> None:
        """Multiply the pending scalar into the gradients: one fused pass."""
        self.reducer.scale_(self.final.factor.float())
        self.final.applied()

    def hand_over(self) -> None:
        """Give `.grad` to the caller: final values now, and what is left there counts into the next window."""
        self.finish()
        if self.final.is_pending:
            self.write()
        self.norms.apply(self.final.found_inf == 0)
        self.carry.is_callers = True
        self.comm.launch()

    def used(self) -> None:
        """Note that an optimizer has used the window: the next one starts from zero."""
        if not self.is_used:
            self.norms.apply(self.final.found_inf == 0)
            self.outcomes.count_step()
        self.is_used = True
        self.carry.clear()
        self.comm.launch()

    @property
    def is_between_windows(self) -> bool:
        """Whether no window is open, and the last one's gradients have been used or are the caller's."""
        sent = self.window.state is State.SYNCED
        return self.is_used or self.carry.is_callers if sent else self.window.state is State.IDLE

    def retire(self) -> None:
        """Close the window; complain about gradients that nobody used."""
        window = self.window
        if window.state is State.OPEN:
            raise RuntimeError(
                f"window {window.index} was left after {window.done} backwards and never sent: call sync.flush() and "
                "sync.step to use it, or sync.abandon() to drop it"
            )
        if not self.is_between_windows:
            raise RuntimeError(
                f"the gradients of window {window.index} were reduced and never used (1/count and clipping are still "
                "pending): call sync.step(optimizer), or sync.unscale_() to use .grad yourself, or sync.abandon()"
            )
        window.close(completed=window.state is State.SYNCED)

    def start_over(self) -> None:
        """Begin a new loop: a window that an exception left half-way, or that was refused, is dropped."""
        refused = self.verdict is not None and self.verdict.error is not None
        left = self.window.state is State.OPEN and not self.window.is_resumed
        if left or self._gave_up or refused:
            self.abandon()

    def abandon(self) -> None:
        """Drop the current window on this rank; the engine is clean afterwards.

        Before the window was sent, nobody notices: the next window takes its place. Afterwards this rank still waits
        for the reductions it owes the others.
        """
        if self.window.state is State.SYNCED and self.verdict is None:
            # The others hear of what was wrong; here the window goes anyway.
            with suppress(ValueError, FloatingPointError):
                self.finish()
        if self.scaler is not None and self.verdict is not None and not self.is_used:
            self.scaler.follow()  # the others update theirs when they step
        self.comm.launch()
        self.drop()

    def drop(self) -> None:
        """Drop the current window without waiting for anybody."""
        self.norms.close()
        self.window.close(completed=self.window.state is State.SYNCED)
        self.carry.clear()
        self._reset()

    def resume(self, part: Snapshot, *, due: Sequence[int] | None) -> None:
        """Go on from a snapshot; what it holds is taken in at the first backward, as if that went on.

        Args:
            part: what is this rank's now.
            due: places that this rank has still to compute in the window that has begun; None if none has.
        """
        self.window.go_to(part.window)
        self._reset()
        self.carry.load(part.carry, has_begun=due is not None)
        self.outcomes.steps_taken = part.steps
        self._opened_at = part.window
        if due is not None:
            self.window.resume(part.places, due)
            for loss, count in zip(part.losses, part.counts, strict=True):
                self.local.take(torch.tensor(loss, dtype=torch.float64), count)
            self.resumed = part
        if part.is_between_loops:
            set_rng_states(part.rng)  # before the loader draws
        else:
            self._rng = part.rng  # which goes on behind what the loader has drawn
        self.comm.launch()

    def _reset(self) -> None:
        self.verdict = None
        self.local = self.reducer.local_window(self.terms)
        self.resumed = None
        self._header: Header | None = None
        self.is_used = False
        self.more = False
        self._has_begun = False
        self._gave_up = ""
        self.final.reset()

    def _begin(self) -> None:
        if self._has_begun:
            return
        self.clock = Clock(self.device)
        self.traffic_before = (self.comm.traffic.collectives, self.comm.traffic.bytes_sent)
        self.carry.take_along()
        self.reducer.begin()
        self._has_begun = True
        if self.resumed is not None:
            self.reducer.load(self.resumed.sums, done=len(self.resumed.places))
            self.resumed = None

    def _send(self, backward: Callable[[], None] | None, loss: Tensor | None) -> None:
        self.reducer.before_header()
        # The previous window's, if the host has let it run ahead: this header tells of its step. Here, behind every
        # collective that a forward may launch, all ranks are at the same point.
        self.outcomes.catch_up(self.window.index)
        self._position = (self.window.index, self.outcomes.steps_taken)
        self._header = Header(
            self.comm, self.device, local=self.local, position=self._position, more=self.more
        )
        self.norms.launch(self.comm)
        self.window.state = State.SYNCED
        try:
            self.reducer.reduce(self._header, backward, loss)
        except Exception as error:
            self._gave_up = repr(error)
            self.reducer.give_up(self._header)
            raise

    def _conclude(self, header: Header) -> Verdict:
        """Decide on the device whether the window may be used, and keep what the host needs to say why not."""
        self.final.forbid(header.forbids())
        if self.scaler is not None:
            self.final.multiply(self.scaler.inv_scale())
        if self.carry.is_pending:
            self.write()
            self.final.replace_norm(self.carry.add())
        evidence = Evidence(
            self.window.index,
            self._position,
            self.local,
            self._gave_up,
            self.reducer.names,
            self.reducer.blame(),
        )
        return Verdict(header, self.final, evidence, comm=self.comm, raises=self._raises)
