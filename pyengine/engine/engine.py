"""The engine: how it is made, and the order of a window with every collective and every way to fail.

[Note: order of collectives in a window]
torch.distributed pairs the collectives of a process group by their order on each rank, so all ranks have to
launch the same ones in the same order. Of a window these are, on the engine's own group ("engine") and on the
groups over which gradients are summed ("buckets"):

 1. engine   before the first forward, only where ranks have to know what the others have: the header of
             `Engine.meet`, `sum_over_ranks` of counts that are read ahead, or `max_of` for FSDP2's collective
             forwards; between windows that of `Engine.assemble`, and what the call behind it gathers.
 2. FSDP2    all-gathers in every forward and backward, on its units' meshes; reduce-scatters in the window's
             last backward only, unless `defer` differs.
 3. engine   the verdict of the window before, if a host that runs ahead has not reached it: gathers, and only
             of a window that went wrong (`Verdict.reach`).
 4. engine   the header all-reduce.
 5. buckets  each bucket's reduction, in the order of the layout; of a bucket with several collectives a later
             one follows when the next bucket starts. Under FSDP2 the order is that of its units in the
             backward.
 6. buckets  the flags of used parameters (`UsedAnywhere.all_reduce`), between hosts where these have a group;
             not where the header says that every rank had used all of its parameters before it.
             Then the broadcast of a DDP's buffers.
 7. engine   once in an engine's life the order in which gradients came.
 8. engine   in `wait`: the norm, where ranks hold different elements (`Holdings`); sums of `sync.measure`;
             the audit's checksums; the gathers of the verdict, if something is wrong.
 9. engine   in each call that clips or returns norms by name, where ranks hold different elements: on the
             host a header, and the norm again (`Engine.renew_norm`).

Why the order is the same on every rank: on the engine's group everything is launched by the program, at
places that all ranks reach, and what is conditional depends on reduced numbers or on arguments that ranks
have compared. When a bucket is complete is a matter of autograd and time, so buckets are launched in the
order of the layout and not of completion. Where a host waits for collectives, a bucket is launched only when
the header has come, which is sooner on one rank than on another: there buckets have a process group of their
own (`Comm.with_own_group`). Where a stream waits, no host has to look at the header, and one group
keeps the order.

After an exception `Reducer.give_up` launches the collectives that are still missing, with values that void
the window. Behind a header in which ranks disagree nothing follows, wherever the host can see that without
waiting for a device: another engine's buckets would have other sizes.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from pyengine.audit.auditor import AuditError
from pyengine.comm.base import Comm, Unbroken
from pyengine.data.rng import set_rng_states
from pyengine.engine.backward import BeforeBackward, checked_backward, divided_by, is_scaled, reduction_of
from pyengine.engine.engine_ranks import EngineRanks, ShardedRanks
from pyengine.engine.handshake import Shares, agree, problems_of, problems_of_exact, raise_problems, resized
from pyengine.engine.kept_grads import KeptGrads
from pyengine.engine.parameters import (
    Ownership,
    TrainedParameters,
    WrittenParameters,
    in_backward_problems,
    owned_problems,
)
from pyengine.engine.snapshot import Snapshot, identify
from pyengine.engine.window_audit import WindowAudit
from pyengine.engine.window_graph import WindowGraph
from pyengine.gradients.base import Reducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.marks import REMEDY, GradMarks
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings
from pyengine.ops.capture import report as report_uncapturable
from pyengine.ops.device import HOST, Readback, flush, is_lazy, runs_ahead, send
from pyengine.ops.trace import span
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.step_record import Clock, StepCallback, StepRecord
from pyengine.step.window_optimizer import OptimizerCheck
from pyengine.window.claims import Claims, OptimizerStep
from pyengine.window.counter import Runs, State, WindowCounter
from pyengine.window.denominators import Denominators
from pyengine.window.final_pass import FinalPass, Holdings
from pyengine.window.header import (
    Count,
    Header,
    LocalWindow,
    SharedBatch,
    Totals,
    checked_count,
    make_local_window,
)
from pyengine.window.measure import Measure, Measured, ReducedWindow
from pyengine.window.verdict import (
    Evidence,
    Outcome,
    Verdict,
    VerdictQueue,
    call_all,
    check_agreement,
    check_stage,
)

_log = logging.getLogger("pyengine.engine")

# Where a rank is, for the stall report.
_FREED = "the end of its engine, which was freed: keep `sync` in a variable for as long as the other ranks do"
_SENDS = "sends a window"
_MEASURE = "call it between windows, for example before the loop"


class Engine:
    """The engine behind `GradSync` and `attach`: it owns the gradients of parameters and opens one window
    after the other. The methods are in the order in which they are called.

    =================================  ==================  ==================================================
    method                             state of `counter`  [Note: order of collectives in a window]
    =================================  ==================  ==================================================
    `open`                             IDLE → OPEN         after `close_window` of the one before
    `hand_out`, `pad`, `end_hand_out`                      1, 2
    `begin`                                                before the first backward
    `micro_batch`, `last_backward`
    `launch_header`, `launch`          OPEN → SENT         3 to 7
    `wait`                             SENT → REDUCED      8
    `step`, or `hand_over`             REDUCED → USED
    `close_window`                     USED → IDLE
    =================================  ==================  ==================================================

    `run_again` is all of it from `begin` to `step`, for a window whose device work runs as a graph.

    A window ends in one of four ways:
      `step`: an optimizer uses the gradients (with `hand_over` the caller does).
      `flush`: launched without a last backward, however many micro-batches it has; then as with `step`.
      `abandon`: dropped on this rank. Launched collectives are still waited for, because other ranks wait for
          this one. After an exception in a last backward that has sent it the window is void on every rank.
      `close_window`: the loop is done with it, and the next one may open; an error if it was not used.
    """

    clock: Clock  # of this window, from `begin` on

    def __init__(
        self,
        reducer: Reducer,
        comm: Comm,
        settings: Settings,
        *,
        shares: Shares,
        batch: SharedBatch | None,
        module: nn.Module | None,
    ) -> None:
        names, params = reducer.names, reducer.params
        held = f"{len(params)} parameters, the first {names[0]!r}"
        if reducer.counted is not None:  # ranks may have others
            held = f"parts of a model on {comm.world_size} ranks"
        # ---- of all windows ----
        # An identity that all ranks of the engine have in common.
        self.name = f"{held} (engine {shares.engine_id % 2**32:08x})"
        self.device = device = params[0].device
        self.reducer, self.comm = reducer, comm
        # The module that has the parameters; None where the engine was made over the parameters alone.
        self.module = module
        # The batch that this rank shares with others; None where every rank has its own.
        self.batch = batch
        # How a full window is divided among ranks.
        self.shares = shares
        self.is_exact = settings.kind == "exact"
        # Whether ranks share batches, or hold other elements of parameters.
        self.holds_parts = batch is not None or reducer.counted is not None
        # What a state has to fit.
        self.identity = identify(settings.kind, shares.terms, shares.run, names, reducer.local_params())
        # Where ranks are, and in which state the window is.
        self.counter = WindowCounter(settings.accumulate, share=shares.of(comm.rank))
        # Gradients that no optimizer has used, which count into the next window.
        self.kept_grads = KeptGrads(names, params)
        # The gradients in `.grad`, for example of a window that has been reduced.
        self.published = Published(names, params)
        # Detects gradients that were written past the engine.
        self.marks = GradMarks(reducer, self.published)
        # Norm and finite flags of the mean gradients.
        holdings = None if reducer.counted is None else Holdings(reducer.counted, comm, device)
        self.final = FinalPass(len(params), device, holdings)
        # Of this window and earlier ones, and the steps taken.
        self.verdicts = VerdictQueue(device)
        # Whether the model still trains the parameters that the engine was made over.
        self.trained = TrainedParameters(names, params, module)
        # Whether others write to parameters inside a window.
        self.written = WrittenParameters(params)
        # Makes the record of a window's counts and losses.
        most = shares.micro_batches if self.is_exact else math.inf
        self.new_counts = make_local_window(
            device, is_exact=self.is_exact, max_micro_batches=most, batch=batch
        )
        # Whether inf and nan are an error.
        self.raises = settings.raises
        # Whether the host lets the device run ahead, and learns of a window's outcome in the next one.
        self.is_late = not settings.raises and runs_ahead(device)
        # What is measured in every window.
        self.measures: list[Measure] = []
        # The names of all ranks' parameters, once norms by name have been asked for.
        self._measured: Measured | None = None
        self.scaler: GradScaler | None = None
        self.audit: WindowAudit | None = None
        # By id, what gets the records of steps.
        self.callbacks: OrderedDict[int, StepCallback] = OrderedDict()
        # Makes the record of the last step whose numbers the host knows.
        self.make_record: Callable[[], StepRecord] | None = None
        # Items of a micro-batch that `retry_smaller` runs at once; None: all of them.
        self.part_size: int | None = None
        # What the user has been warned of already.
        self.warned: set[str] = set()
        # Index of the first window that this object has opened: not 0 behind a state.
        self._first_window: int | None = None
        self._running = Lock()
        self.ownership = Ownership(params, self)
        # The version of a parameter at the last backward past this engine.
        self._bare_version: int | None = None
        # The index of the window that was opened last, or of the state that was loaded since.
        self.opened_at = -1
        # Whether a loop over `windows` has run out and no other one has begun.
        self.is_between_loops = False
        # Loaded states of random generators, which the next window sets.
        self.rng_due: dict[str, Any] = {}
        self.reset()
        _log.debug("make a %s of %s", type(reducer).__name__, self.name)
        flush(device)

    def reset(self) -> None:
        """Forget the window: the next one starts without counts."""
        # ---- of this window, on this rank ----
        # Counts and losses.
        self.counts = self.new_counts()
        # Runs of micro-batches, each of which is accumulated once.
        self.runs = Runs(self.shares.run)
        # The totals over which its losses are means, if counts were read ahead.
        self.denominators: Denominators | None = None
        # Whether another window follows, as far as this rank knows.
        self.has_more_windows = False
        # Whether the micro-batch handed out last is padding: its loss and count are not noted.
        self.is_padding = False
        # Whether a backward has run, as far as that is known.
        self.has_backward = False
        # Parts of micro-batches that ran out of memory, and ran again.
        self.num_retries = 0
        self._has_begun = False
        # None until it is launched.
        self.header: Header | None = None
        self._is_launching = False
        # The exception that ended its last backward, as text; empty if none did.
        self.gave_up = ""
        # The exception that ended its reduction, as text; empty if none did.
        self.failure = ""
        # The outcome, None until it has been reduced; the host may not know it yet.
        self.verdict: Verdict | None = None
        # Why this rank cannot use the window, found after it was launched; empty if it can.
        self.unusable = ""
        # Whether the loss scale has been updated by its outcome.
        self._is_scale_updated = False
        # The optimizers that have been stepped with it, each with its scheduler.
        self.stepped: list[Stepped] = []
        self._traffic = (self.comm.traffic.collectives, self.comm.traffic.bytes_sent)
        self.final.reset()
        self.written.forget()
        self.marks.release()  # hooks of the last window would refuse this one

    # ---- open ----

    def open(self) -> None:
        """Open a window; the previous one must have been used."""
        self.close_window()
        self.opened_at = self.counter.index
        if self._first_window is None:
            self._first_window = self.counter.index
        self.reset()
        self.counter.open()
        self._bare_version = None
        self.ownership.follow()
        self.reducer.open()
        # Before any forward, in which FSDP2 shows other parameters.
        self.counts.refusals += self.trained.problems()
        if self.rng_due:
            set_rng_states(self.rng_due)
            self.rng_due = {}

    def hand_out(self, place: int, *, last: bool, more: bool) -> None:
        """Count a micro-batch given to the loop: the window's `last`, with `more` windows behind it."""
        self.counter.hand_out(place, last=last)
        self.has_more_windows, self.is_padding = more, False

    def pad(self, *, last: bool) -> None:
        """Count a micro-batch of padding, given to the loop because other ranks run one."""
        self.end_run()
        self.counter.pad(last=last)
        self.is_padding = True
        self.reducer.begin_padding()

    def end_hand_out(self) -> None:
        """Note that the loop gets no further micro-batch; backwards that are still due may follow. Without
        any, for example in an empty window, wait here, so that `.grad` is the mean on this rank too.
        """
        self.counter.is_exhausted = True
        if not self.counter.has_micro_batch_out and self.counter.state is not State.IDLE:
            self.wait()

    # ---- accumulate ----

    def begin(self, *, may_replace: bool = False) -> None:
        """Start with sums of zero; called before every micro-batch, and before a window that is launched
        without one. Refuse what others have done to gradients since the engine's last look; `may_replace`:
        the backwards to come may replace gradients, which would hide that others have.
        """
        if self._has_begun:
            self.look()
            if may_replace:
                self.counts.refusals += self._problems_of_gradients()
            return
        if found := self.written_past():  # a gradient since the last window, not zeroed: it would be lost
            text, is_more_than_zeros = found
            if isinstance(is_more_than_zeros, Tensor):
                self.counts.doubts.append((text, is_more_than_zeros))
            else:
                self.counts.refusals.append(text)
        self.clock = Clock(self.device)
        self.kept_grads.keep()
        self.reducer.begin()
        for measure in self.measures:
            measure.begin()
        self._has_begun = True
        if self.audit is not None:
            self.audit.begin(self.counter.index)
        self.marks.record()
        self.marks.watch_hooks(self._refuse_taken)
        if not is_lazy(self.device):
            self.written.record()

    def follow_scale(self) -> None:
        """Let the residuals of wires follow the loss scale, whoever has changed it."""
        if self.reducer.residuals.is_kept:
            scaler = self.scaler
            self.reducer.residuals.follow(None if scaler is None else scaler.current_scale())

    @contextmanager
    def micro_batch(self, count: Count, *, is_stated: bool, may_replace: bool) -> Iterator[MicroBatch]:
        """Make the body one micro-batch, whose backwards it runs; then accumulate, and launch the window if
        this is its last one and no backward was marked as the last. `may_replace` as for `begin`.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "backward while another backward of this engine is running, in another thread or around "
                "this one: a window's micro-batches run one after the other; in `with sync.micro_batch():` "
                "call loss.backward() itself; give each thread an engine of its own, or add the losses up"
            )
        try:
            made = MicroBatch(self, count, is_stated=is_stated)
            self.begin(may_replace=may_replace)
            self._check_turn()
            for measure in self.measures:
                measure.begin_micro_batch()
            try:
                sparing: AbstractContextManager[object] = nullcontext()
                if self.is_padding:  # its backwards must not change gradients that are not the engine's
                    self.reducer.preserve_grads(())
                    sparing = BeforeBackward(self.reducer.preserve_grads)
                with self.clock.phase("backward"), sparing:
                    yield made
                    if not made._has_only:
                        self._refuse_wrong(made)
                    if not made._has_last:
                        self._note(made)
                        if made._ends_run:
                            self.reducer.collect()
                if may_replace:
                    self.reducer.follow_replaced_grads()
                if made._syncs and self.counter.state is State.OPEN:
                    self.launch()
            except BaseException as error:
                if self.counter.state is State.OPEN:
                    self.counts.refusals.append(
                        f"micro-batch {made._index} was left by an exception ({error!r}), and its gradient "
                        "may not be whole"
                    )
                raise
            finally:
                self.marks.record()
        finally:
            self._running.release()

    def last_backward(self, made: MicroBatch, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Run the last backward of a micro-batch in the body, and accumulate its gradients from inside it; in
        the window's last micro-batch launch the header before it, and each bucket as soon as it is complete.
        """
        made._has_last = self.has_backward = True
        if not made._has_only:
            self.reducer.follow_replaced_grads()  # by earlier backwards of the block
        self._note(made)
        if made._syncs and self.reducer.overlaps:
            return self._overlap(roots)
        return self.reducer.add() if made._ends_run else self.reducer.leave_in_grad()

    @contextmanager
    def _overlap(self, roots: Sequence[Tensor]) -> Iterator[None]:
        with self.launch_header() as header, self.reducer.overlap(header, roots):
            yield

    def _note(self, made: MicroBatch) -> None:
        """Count a micro-batch: from here on the window's header may be launched."""
        self.counter.count_backward()
        self.counts.is_silent |= not made._is_stated
        if not self.is_padding:
            self.runs.add(ends=made._ends_run)
            self.counts.append(made.loss, made.count)

    def end_run(self) -> None:
        """Accumulate a run that gets no further micro-batch."""
        if self.runs.is_open:
            self.reducer.collect()
            self.runs.end()

    # ---- launch ----

    def flush(self) -> None:
        """Launch and reduce what has been accumulated, without a backward; see `Sync.flush`."""
        self.check_idle("flush")
        if self.counter.state is State.IDLE:
            raise RuntimeError(
                "flush outside a window: there is nothing to send; open one with sync.windows(loader)"
            )
        if self.counter.state is State.OPEN:
            self.begin()
            self.launch()
        self.wait()

    def launch(self) -> None:
        """Launch header and reductions behind the last backward, or without one."""
        self.end_run()
        with self.clock.phase("exposed_sync"), self.launch_header() as header:
            self.reducer.reduce(header)
        self.marks.record()

    @contextmanager
    def launch_header(self) -> Iterator[Header]:
        """Launch the header all-reduce; launch the buckets inside the `with` block."""
        # The verdict of the previous window, if the host lets the device run ahead: the header states its
        # step. Here all ranks are behind every collective that a forward may launch.
        self.verdicts.reach_earlier(self.counter.index)
        if self.denominators is not None:
            self.counts.refusals += self.denominators.problems(self.counter.done, handed=self.counter.handed)
        self.counts.refusals += self._problems_of_gradients()
        self.counts.refusals += self._problems_of_parameters()
        self.counts.has_used_all = self.reducer.has_used_all()
        if self.scaler is not None and self.has_backward:
            self.counts.has_scaled = self.scaler.has_scaled
        self.follow_scale()
        with Unbroken(self.comm):
            self.header = header = self.launch_header_all_reduce(
                self.counts, more=self.has_more_windows, stage=_SENDS
            )
            self.counter.state, self._is_launching = State.SENT, True
        try:
            yield header
        except BaseException as error:
            # Other ranks wait for the buckets that are still missing.
            _log.debug("window %d: give up after %r", self.counter.index, error)
            self.gave_up = repr(error)
            self.reducer.give_up()
            raise
        finally:
            self._is_launching = False

    def launch_header_all_reduce(self, counts: LocalWindow, *, more: bool, stage: str) -> Header:
        """Launch a header: this rank's place and counts, and what ranks have to have alike. 184 bytes; 232
        where ranks share batches.
        """
        return Header(
            self.comm,
            self.device,
            local=counts,
            position=self._position(),
            more=more,
            claims=self._claims(stage),
            inv_scale=None if self.scaler is None else self.scaler.inv_scale(),
        )

    def _position(self) -> tuple[int, int]:
        return self.counter.num_sent, self.verdicts.steps_taken

    def _claims(self, stage: str) -> Claims:
        scaler = self.scaler
        settings = "" if scaler is None else scaler.settings()
        # On a lazy device reading the scale would end the program.
        scale = None if scaler is None or is_lazy(self.device) else scaler.current_scale()
        kept = self.kept_grads.pending() if self.shares.are_alike else ()
        use = self.verdicts.last_use()
        return Claims(stage, self.name, settings, scale, use, self.counter.accumulate, kept)

    # ---- wait ----

    def wait(self) -> Verdict:
        """Wait for the reductions, publish the mean as `.grad`, and decide on the device whether it may be
        used; once a window. Unless the device runs ahead, the host learns the outcome here.

        Raises what any rank got wrong, on every rank; where the device runs ahead at the next
        `reach_verdicts`.
        """
        self.check_idle("step, clip or unscale")
        if self.counter.state is State.OPEN and self.counter.is_exhausted:
            self.begin()  # some micro-batches had no backward
            self.launch()
        if not self.counter.is_sent:
            self.refuse_written_past()
            remedy = (
                "finish the window, or call sync.flush() to end it here"
                if self.counter.state is State.OPEN and self.counter.done
                else "call sync.backward(loss) in a window first"
            )
            raise RuntimeError(
                f"{remedy}: no synchronised gradients: {self.counter.state.value} "
                f"({self.counter.done} of {self.counter.accumulate} backwards done)"
            )
        if self.verdict is None and self.header is not None and self.header.disagreement:
            raise RuntimeError(self.header.disagreement)  # found in the backward: nothing follows
        verdict = self._wait_once() if self.verdict is None else self.verdict
        if not self.is_late:
            self.reach_verdicts()
        if self.unusable:
            raise RuntimeError(self.unusable)
        return verdict

    def _wait_once(self) -> Verdict:
        header = self.header
        assert header is not None  # the counter says SENT
        changed = self.marks.changed()
        with self.clock.phase("exposed_sync"):
            try:
                self.reducer.finish(self.final)
            except BaseException as error:
                self.failure = str(error) or repr(error)
                raise
            if self.audit is not None:
                self.audit.sample(self.scaler)
            params = self.reducer.params
            has_gradient = is_lazy(self.device) or any(param.grad is not None for param in params)
            has_kept = bool(self.kept_grads.pending())
            if has_kept:
                self.kept_grads.add()
                self.published.read(self.final)
            self.final.compute_norm(is_refused=header.is_refused())
        self.verdict = verdict = self._conclude(header, has_gradient=has_gradient, has_kept=has_kept)
        if not header.was_refused:
            self.reducer.residuals.drop_if(self.final.found_inf)
        self.counter.state = State.REDUCED
        self.verdicts.append(verdict)
        if self.scaler is not None:
            self.scaler.has_scaled = False
        if self.audit is not None and not header.was_refused:
            try:
                self.audit.check(self.counts, header, self.final)
            except AuditError as error:
                self.unusable = f"{error}. Nothing was stepped; call sync.abandon(), or restore a checkpoint"
                raise
        if changed:
            with suppress(RuntimeError):  # `wait` raises it, behind what ranks conclude together
                self.refuse(self.marks.describe(changed, "behind the window's end"))
        self.marks.record_published()
        return verdict

    def _conclude(self, header: Header, *, has_gradient: bool, has_kept: bool) -> Verdict:
        """Decide on the device whether the window may be used, and keep what explains to the host why not."""
        self.final.forbid(header.forbids())
        measures = [] if header.is_refused() else [*self.measures]
        for measure in measures:
            limit = measure.wait(ReducedWindow(header, self.counts, is_whole=not has_kept))
            if limit is not None:
                # inf / inf would be nan where the window is skipped.
                self.clip(limit, self.final.grad_norm().nan_to_num(0.0, 0.0, 0.0))
        evidence = Evidence(
            self.counter.index,
            self.counts,
            self.gave_up,
            self.reducer.names,
            self.runs.blame(self.reducer.blame()),
            lambda: "; ".join(filter(None, (measure.reason() for measure in measures))),
            self.scaler is not None,
            self.has_backward,
            has_gradient,
        )
        outcome = Outcome.of(header, self.final)
        return Verdict(header, outcome, evidence, comm=self.comm, raises=self.raises)

    def reach_verdicts(self) -> None:
        """Learn the outcome of every window that was reduced; every rank calls this at the same point."""
        self.verdicts.reach_all()
        if self.verdict is not None:
            self.verdict.reach()  # raises again what was wrong with it

    # ---- use ----

    @property
    def is_void(self) -> bool:
        """Whether the host knows that a rank gave the window up: that one may not call what others call, so
        no collective follows, and the norm stays nan.
        """
        return not self.is_late and bool(self.final.void != 0)

    def renew_norm(self, stage: str, *, has_changed: bool = False) -> None:
        """Compute the norm again if gradients were written to, or replaced, since it was computed.

        Where ranks hold different elements that is a collective, which on the host a header precedes: a rank
        that has left the window sends the header of its next one, and all ranks raise.

        Args:
            stage: what the collective is for.
            has_changed: the gradients have just been written to, whatever their versions show.
        """
        if self.is_void:
            return
        with Unbroken(self.comm):
            if self.final.is_shared and not runs_ahead(self.device):
                header = self.launch_header_all_reduce(self.new_counts(), more=False, stage=stage)
                check_agreement(header, header.totals(), self.comm)
            if has_changed := has_changed or self.published.has_changed():
                self.published.read(self.final)
                self.published.record()
            self.final.renew_norm(was_read=has_changed)

    def renew_norm_alone(self) -> None:
        """Compute the norm again as `renew_norm`, where this rank can without the others."""
        if not self.final.is_shared:
            self.renew_norm("reads the norm")
        elif self.reducer.holds_all and not self.is_void and self.published.has_changed():
            self.published.read(self.final)
            self.published.record()
            self.final.renew_norm_alone()

    def clip(self, max_norm: float | Tensor, norm: Tensor) -> None:
        """Multiply the gradients by min(1, max_norm / norm), where the host does not see that this is 1."""
        factor = self.final.clip(max_norm, norm)
        if self.is_late or runs_ahead(self.device) or float(factor) != 1:
            self.published.scale_(factor.float())
            self.note_own_writes()

    def note_own_writes(self) -> None:
        """Note that the engine itself has written to `.grad`, behind the window's end."""
        self.marks.record_published()

    def measured(self) -> Measured:
        """Keep norms by name from now on; every rank calls this at the same point.

        Cost: where ranks have other parameters one `all_gather_object` of names, the first time.
        """
        if self._measured is None:
            names, trains = list(self.reducer.names), [param.requires_grad for param in self.reducer.params]
            by_rank: list[list[tuple[str, bool]]] = [[*zip(names, trains, strict=True)]]
            if not self.shares.are_alike:
                by_rank = self.comm.all_gather_object(by_rank[0])
            trained: dict[str, bool] = {}
            for name, trains_it in (pair for each in by_rank for pair in each):
                trained[name] = trains_it or trained.get(name, False)
            place_of = {name: place for place, name in enumerate(trained)}
            self.final.add_names([place_of[name] for name in names], len(trained))
            about = self.final, self.comm, self.reducer, self.holds_parts
            self._measured = Measured([*trained], [*trained.values()], *about)
        return self._measured

    def measure(self, measures: Sequence[Any]) -> None:
        """Measure in every window from the next one on; see `Sync.measure`."""
        self.assemble("calls sync.measure, as every rank has to")
        problems = (
            [] if self.is_closed else [f"measure in the middle of window {self.counter.index}: {_MEASURE}"]
        )
        measured, kinds = self.measured(), {type(each) for each in self.measures}
        for each in measures:
            if not isinstance(each, Measure):
                problems.append(
                    f"measure: got a {type(each).__name__}; need pe.GradNorms() or another measure"
                )
                continue
            if type(each) in kinds:
                problems.append(f"measure: got a second {type(each).__name__}: give each kind once")
            elif each.is_bound:
                problems.append(f"measure: {each!r} was given to another engine: make one for each engine")
            kinds.add(type(each))
            problems += each.problems(measured)
        mine = repr([*measures])
        found, texts = zip(*self.comm.all_gather_object((problems, mine)), strict=True)
        raise_problems(found)
        if len(set(texts)) > 1:
            raise_problems(
                [[f"measure got {text}, and ranks differ: give all ranks the same"] for text in texts]
            )
        for each in measures:
            each.bind(measured)
        self.measures += measures

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any, check: OptimizerCheck) -> Tensor:
        """Step an optimizer with the gradients, unless they were not finite on some rank; see `Sync.step`.

        Callbacks get the record of the window's first step, in order.
        """
        verdict = self.wait()
        self._refuse_written()
        done, factors = check.of(optimizer, is_handed_over=self.kept_grads.is_handed_over)
        stepped = {index for group in done.params for index in group}
        self.trained.notice_step(stepped)
        if not self.shares.are_alike:
            done = replace(done, params=())  # other stages have others
        if self.is_late and self.reducer.stepper.needs_host(optimizer):  # else `wait` has reached them
            report_uncapturable(
                f"the step of {type(optimizer).__name__} waits for the host, which decides whether to skip: "
                "make it fused=True, with capturable=True if it has that"
            )
            self.reach_verdicts()
        if self.audit is not None:
            self.audit.look_at(optimizer)
        norm = self.final.norm_before_clipping()
        try:
            with span("optimizer"):
                self.reducer.stepper.step(optimizer, self.final)
            self.written.forget()  # its own writes, and those of further optimizers
        except BaseException:
            # It may have changed parameters: the next header shows a rank that steps it again.
            verdict.use.steps.append(replace(done, name=f"{done.name}, which raised,"))
            raise
        finally:
            self._update_scale()
        has_stepped = self.final.found_inf == 0
        report = None if self.counter.state is State.USED else self._report(verdict, norm)
        # On a lazy device ranks do not compare these: each factor would be one more output of the program.
        if not is_lazy(self.device):
            verdict.use.steps.append(done)
            verdict.use.factors += [self.final.clipped, *factors]
        self.stepped.append(Stepped(optimizer, scheduler, done, stepped))
        if self.counter.state is not State.USED:
            self.verdicts.count_step()
        self.counter.state = State.USED
        self.kept_grads.use(stepped, self.final.found_inf)
        self.marks.record_published()
        flush(self.device)
        self._call_once_known(verdict, scheduler, report)
        return has_stepped

    def _call_once_known(
        self, verdict: Verdict, scheduler: Any, report: Callable[[Totals, bool], None] | None
    ) -> None:
        """Let scheduler and record follow. The window has been used, whatever the user's own code does."""
        actions: list[Callable[[], None]] = []
        if scheduler is not None:
            actions.append(partial(verdict.once_known, lambda skips: None if skips else scheduler.step()))
        if report is not None:
            actions.append(partial(verdict.then, report, awaits=bool(self.callbacks)))
        call_all(actions)

    def hand_over(self) -> None:
        """Leave the window's gradients to the caller; what is left of them counts into the next window."""
        verdict = self.wait()
        self._refuse_written()
        self.written.forget()
        verdict.use.is_handed_over = True
        self._update_scale()
        self.kept_grads.hand_over()
        flush(self.device)

    def _update_scale(self) -> None:
        """Update the loss scale by the outcome, once."""
        if self.scaler is not None and not self._is_scale_updated:
            self.scaler.follow()
            self._is_scale_updated = True

    def _report(self, verdict: Verdict, norm: Tensor) -> Callable[[Totals, bool], None]:
        """Stop the clock, and return what makes this window's record once the numbers are known."""
        clock, held_bytes, num_retries = self.clock, self.reducer.held_bytes, self.num_retries
        collectives = self.comm.traffic.collectives - self._traffic[0]
        sent = self.comm.traffic.bytes_sent - self._traffic[1]
        # Also without callbacks: ranks whose programs differ cannot meet.
        index, grad_norm = self.counter.index, Readback(norm.reshape(1))
        unread = [(measure, Readback(measure.numbers())) for measure in self.measures]
        clock.stop()

        def emit(totals: Totals, skips: bool) -> None:
            measured = {each.field: each.record(numbers.get(), skipped=skips) for each, numbers in unread}

            @cache
            def make_record() -> StepRecord:
                return StepRecord(
                    step=index,
                    micro_batches=totals.micro_batches,
                    count=totals.count,
                    loss=totals.loss / totals.count if totals.count and not totals.unknown_losses else None,
                    grad_norm=grad_norm.get()[0],
                    skipped=skips,
                    reason=verdict.reason,
                    bytes_on_wire=sent,
                    collectives=collectives,
                    backward_s=clock.seconds("backward"),
                    exposed_sync_s=clock.seconds("exposed_sync"),
                    step_s=clock.elapsed(),
                    held_bytes=held_bytes,
                    num_retries=num_retries,
                    **measured,
                )

            self.make_record = make_record
            if self.callbacks:  # else nobody waits for the device's seconds
                call_all([partial(callback, make_record()) for callback in self.callbacks.values()])

        return emit

    # ---- close, or abandon ----

    @property
    def is_closed(self) -> bool:
        """Whether no window is open, and the last one's gradients have been used or are the caller's."""
        return self.counter.state in (State.IDLE, State.USED) or (
            self.counter.is_sent and self.kept_grads.is_used
        )

    def close_window(self) -> None:
        """Close the window; raise RuntimeError if it was never launched, or its gradients were not used."""
        counter = self.counter
        if counter.state is State.OPEN:
            self.refuse_written_past()
            raise RuntimeError(
                f"window {counter.index} was left after {counter.done} backwards and never sent: call "
                "sync.flush() and sync.step to use it, or sync.abandon() to drop it"
            )
        if self.failure and self.comm.world_size > 1:
            raise RuntimeError(
                f"the gradients of window {counter.index} were not reduced on this rank ({self.failure}): "
                "other ranks may have stepped; restart all ranks from a checkpoint"
            )
        if not self.is_closed:
            raise RuntimeError(
                f"the gradients of window {counter.index} were reduced and never used: call "
                "sync.step(optimizer) in place of optimizer.step(), or sync.unscale_() to use .grad "
                "yourself, or sync.abandon()"
            )
        counter.close(completed=counter.is_sent)

    @property
    def is_broken(self) -> bool:
        """Whether an exception left the window half-way, or it was refused: a new loop has to abandon it."""
        is_refused = self.verdict is not None and self.verdict.error is not None
        is_left = self.counter.state is State.OPEN
        return is_left or bool(self.gave_up or self.unusable or self.failure) or is_refused

    def abandon(self, *, waits: bool = True) -> None:
        """Drop the window on this rank; the engine is clean afterwards.

        Before the window was launched, no other rank notices: the next window takes its number. Afterwards
        this rank still waits for the reductions, in which the others wait for it, unless `waits` is False.
        """
        if waits:
            self.check_idle("abandon")
            # Nothing follows a header in which ranks are known to disagree.
            is_over = self.header is not None and bool(self.header.disagreement)
            if self.counter.state is State.SENT and not is_over:
                try:
                    self.wait()
                except (ValueError, FloatingPointError, RuntimeError):
                    # The others learn what was wrong with the window; here it is dropped anyway. The error of
                    # a collective that broke stays where there are others.
                    if self.verdict is None and self.comm.world_size > 1:
                        raise
            if self.verdict is not None and not self.verdict.was_refused:
                self._update_scale()  # the others update theirs when they step
                if not self.is_closed:  # what the wires have kept of a window that is not used
                    self.reducer.residuals.drop_if(torch.ones((), dtype=torch.float32, device=self.device))
            flush(self.device)
        _log.debug("window %d: abandon, %s", self.counter.index, self.counter.state.value)
        header = self.header if self.verdict is None else self.verdict
        was_refused = header is not None and header.was_refused  # no window of all ranks
        self.counter.close(completed=self.counter.is_sent and not was_refused)
        self.kept_grads.clear()
        self.reducer.abandon()
        self.marks.record_published()
        self.reset()

    def whereabouts(self) -> str:
        """Describe the engine's position to any thread."""
        counter, left = self.counter, f", left by {self.gave_up}" if self.gave_up else ""
        return (
            f"step {self.verdicts.steps_taken}, window {counter.index}, micro-batch {counter.handed} of "
            f"{counter.accumulate} ({counter.state.value}{left})"
        )

    # ---- the same work again, as a graph ----

    def is_regular(self) -> bool:
        """Whether the open window has nothing to do that a graph of another window's work does not: the
        window before was stepped, nothing of it is left, no audit is due, and nothing was found amiss.
        """
        if self.counts.refusals or self.measures or self.kept_grads.has_left() or self.written_past():
            return False
        if self.audit is not None and self.audit.has_work_in(self.counter.index):
            return False
        self.verdicts.reach_earlier(self.counter.index)
        return bool(self.verdicts.last_use().steps)

    def run_captured(self, graph: WindowGraph) -> None:
        """Run the work of the window that has just been captured; nothing of it has run yet."""
        self.clock.start()
        graph.header.fill()
        graph.work.replay()
        self.reducer.run_again()
        self.clock.stop()
        for readback in graph.section.readbacks:  # what the host has asked for in the capture
            readback.start(readback.captured)
        self.marks.record_published()

    def run_again(self, graph: WindowGraph) -> None:
        """Run a window, whose micro-batches have all been handed out, as the graph of an earlier one's work.

        Collectives, states, counts and reports are as from `begin` to `step`. The window `is_regular`.
        """
        counter = self.counter
        self.clock = Clock(self.device)
        self._has_begun = self.has_backward = True
        if self.audit is not None:
            self.audit.begin(counter.index)
        self.counts.take(graph.counts)
        counter.done = counter.handed
        graph.claim(self.verdicts.last_use())
        self.header = header = graph.header.again(
            local=self.counts,
            position=self._position(),
            more=self.has_more_windows,
            claims=self._claims(_SENDS),
        )
        header.fill()
        counter.state = State.SENT
        graph.work.replay()
        self.reducer.run_again()
        self.comm.traffic.collectives += graph.collectives
        self.comm.traffic.bytes_sent += graph.bytes_sent
        vars(self.final).update(graph.final)
        evidence = replace(graph.evidence, index=counter.index, local=self.counts)
        self.verdict = verdict = Verdict(header, graph.outcome, evidence, comm=self.comm, raises=self.raises)
        self.verdicts.append(verdict)
        self._is_scale_updated = True
        for param, grad in zip(self.reducer.params, graph.grads, strict=True):
            if param.grad is not grad:
                param.grad = grad
        self.marks.record_published()
        report = self._report(verdict, self.final.norm_before_clipping())
        self.verdicts.count_step()
        counter.state = State.USED
        verdict.use.factors += graph.factors
        for step in graph.stepped:
            verdict.use.steps.append(step.done)
            self.trained.notice_step(step.indices)
            self.kept_grads.use(step.indices, self.final.found_inf)
        for step in graph.stepped:
            self._call_once_known(verdict, step.scheduler, None)
        self._call_once_known(verdict, None, report)

    def rewind(self) -> None:
        """Forget what a capture that failed has noted of the open window: nothing of it has run."""
        if self.verdict is not None:
            self.verdicts.forget(self.verdict)
        self.reset()
        self.counter.state, self.counter.done = State.OPEN, 0

    # ---- between windows ----

    def meet(self, *, stage: str = "has ended its loop", problems: Sequence[str] = ()) -> None:
        """Raise on every rank unless all ranks are at the same `stage`, have used the last window alike, and
        none has a problem.

        Every rank calls this between windows: the header of a window states how the one before was used, and
        no header follows the last. Or where it has opened a window: if a rank has dropped this window and
        opens it again while the others are in its middle, its header is paired with theirs, and all raise.
        One all-reduce of 184 bytes, for which the host waits; nothing on a lazy device, nor alone.
        """
        self.reach_verdicts()
        gathered: Sequence[Sequence[str]] = [problems]
        if self.comm.world_size > 1 and not is_lazy(self.device):
            local = self.new_counts()
            local.refusals += problems
            header = self.launch_header_all_reduce(local, more=False, stage=stage)
            totals = header.totals()
            check_agreement(header, totals, self.comm)
            gathered = self.comm.all_gather_object(local.refusals) if totals.invalid_counts else []
        raise_problems(gathered)

    def assemble(self, what: str) -> None:
        """Raise on every rank unless all ranks have called this with the same `what`, at whatever positions.

        For calls whose own collectives have other sizes than a header: where only some ranks make such a call
        and the others go on, gloo would end their processes.

        Cost: an all-reduce of 184 bytes, for which the host waits; nothing on a lazy device, nor alone.
        """
        self.reach_verdicts()
        if self.comm.world_size > 1 and not is_lazy(self.device):
            claims = Claims(what, self.name, accumulate=self.counter.accumulate)
            local, position = self.new_counts(), self._position()
            header = Header(self.comm, self.device, local=local, position=position, more=False, claims=claims)
            check_stage(header, self.comm)

    def resize(self, accumulate: int) -> None:
        """Let windows have another size from the next one on; every rank calls this with the same number."""
        if not self.is_closed:
            raise RuntimeError(
                f"gradient_accumulation_steps={accumulate} in the middle of window {self.counter.index}, "
                "or before its step: set it behind a step, or drop the window by sync.abandon() first"
            )
        self.shares = resized(self.shares, accumulate, is_exact=self.is_exact)
        self.counter.accumulate, self.counter.share = accumulate, self.shares.of(self.comm.rank)

    def resume(self, part: Snapshot) -> None:
        """Continue from a snapshot, between windows."""
        _log.debug("window %d: resume", part.window)
        self.counter.go_to(part.window)
        self.reset()
        self.kept_grads.load(part.carry)
        for measure in self.measures:
            measure.load(part.measured.get(measure.field))
        if lost := part.measured.keys() - {measure.field for measure in self.measures}:
            warnings.warn(
                f"load_state_dict: the state has {sorted(lost)} of earlier windows, and this engine does not "
                "measure them: they are lost; call sync.measure before load_state_dict",
                stacklevel=3,
            )
        if self.reducer.residuals.is_kept:
            scale = part.scaler.get("scale")
            known = None if scale is None else send([scale], torch.float32, self.device).reshape(())
            self.reducer.residuals.load(part.residuals, known)
        elif part.residuals:
            warnings.warn(
                "load_state_dict: the state has residuals, of a wire that keeps what it loses, and this "
                "engine's wire does not: they are lost, as a window's rounding is without them",
                stacklevel=3,
            )
        self.marks.record_published()
        self.verdicts.restart(part.steps)
        self.opened_at = part.window
        self.rng_due = {} if part.is_between_loops else part.rng  # set behind what the loader has drawn
        if part.is_between_loops:
            set_rng_states(part.rng)  # before the loader draws
        flush(self.device)

    def close(self) -> None:
        """Release the parameters, without a collective; what is open is abandoned."""
        counter = self.counter
        if counter.state is State.OPEN and counter.done:
            warnings.warn(
                f"close: {counter.done} micro-batches of window {counter.index} had been accumulated and "
                "were never stepped; sync.flush() and sync.step(optimizer) use them",
                stacklevel=3,
            )
        if self.is_late:
            self.verdicts.read_all()
        keeps = self.kept_grads.is_handed_over and not self.stepped
        self.abandon(waits=False)
        for measure in self.measures:
            measure.release()
        self.reducer.release(keeps_grad=keeps)
        self.ownership.release()
        self.comm.release()
        if self.scaler is not None:
            self.scaler.unbind()
        if self.audit is not None:
            self.audit.drop()

    # ---- refusals ----

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError while a micro-batch runs."""
        if self._running.locked():  # in any thread
            raise RuntimeError(
                f"{what} while a micro-batch of this engine is running: leave the block of sync.micro_batch "
                "first"
            )

    def refuse(self, text: str) -> None:
        """Refuse the window on every rank; if it has been launched already, raise RuntimeError here."""
        if self.counter.state is State.OPEN:
            self.counts.refusals.append(text)
        else:
            self.unusable = (
                f"{text}. This rank cannot use the window: repair this, then call sync.abandon() on every "
                "rank. (A rank on which it did not happen may have stepped: the next header says so)"
            )
            raise RuntimeError(self.unusable)

    def look(self) -> None:
        """Refuse the window if its gradients were written past the engine since the last micro-batch."""
        is_open = self._has_begun and self.counter.state is State.OPEN
        if is_open and (found := self.written_past()):
            self.refuse(found[0])
            self.marks.record()

    def written_past(self) -> tuple[str, bool | Tensor] | None:
        """Find gradients that were written past the engine since its last look.

        Returns None, or the text of a refusal and whether it holds: True or a bool, 0-dim, unread, since
        between windows gradients may be zeroed.
        """
        if self._has_begun and self.counter.state is State.OPEN:
            changed = self.marks.changed()
            return (self.marks.describe(changed, "between micro-batches"), True) if changed else None
        if strays := self.reducer.written_outside_grad():
            return self.marks.describe(strays, "between windows"), True
        if is_lazy(self.device):
            return None
        # What no optimizer has used is the user's to change: it counts into this window.
        changed = [index for index in self.published.changed() if not self.kept_grads.keeps(index)]
        found = self.marks.any_nonzero(changed)
        return None if found is None else (self.marks.describe(changed, "between windows"), found)

    def _problems_of_gradients(self) -> Iterator[str]:
        """Yield which gradients others have replaced between micro-batches."""
        if replaced := self.reducer.replaced_grads():
            yield self.marks.describe(replaced, "between micro-batches")

    def _problems_of_parameters(self) -> Iterator[str]:
        """Yield what is wrong with parameters at the window's end: written to, or with a stray gradient."""
        written = [index for index in self.written.written() if self.reducer.is_used(index)]
        if written:
            yield _written_text([self.reducer.names[index] for index in written])
        if strangers := self.trained.strangers():
            yield _stranger_text(strangers)

    def _refuse_written(self) -> None:
        """Raise RuntimeError if parameters were written to behind the window's end, before its step."""
        for text in self._problems_of_parameters():
            self.unusable = f"{text}. Nothing was stepped here"
            raise RuntimeError(self.unusable)

    def refuse_written_past(self) -> None:
        """Raise RuntimeError if gradients were written past the engine since its last look."""
        found = self.written_past()
        if found is not None and found[1]:
            raise RuntimeError(f"{found[0]}. Nothing was stepped")

    def notice_backward(self, param: Parameter) -> None:
        """Warn once where a loop trains past this engine: no window has opened between two backwards that are
        not the engine's, and an optimizer has written to the parameter.
        """
        if self._running.locked():
            return
        version, before = param._version, self._bare_version
        self._bare_version = version
        if before not in (None, version) and "bare" not in self.warned:
            self.warned.add("bare")
            warnings.warn(
                f"{REMEDY}; call sync.step(optimizer) in place of optimizer.step(): {self.name} are "
                "trained past their engine, on gradients of this rank alone. (Call sync.close() where that "
                "is meant)",
                stacklevel=2,
            )

    def _refuse_taken(self, text: str, param: Tensor) -> None:
        """Refuse the window for what a hook has done in one of its backwards.

        Where the header has been launched, nan instead of the gradient voids the window on every rank, and
        the verdict raises why.
        """
        if self._is_launching:
            self.counts.refusals.append(text)
            param.grad = torch.full_like(param, torch.nan)
        elif self.counter.state in (State.OPEN, State.SENT):
            self.refuse(text)

    def _check_turn(self) -> None:
        """Refuse a backward that is not the next micro-batch's, where runs are summed in order."""
        counter = self.counter
        if self.runs.size == 1 or counter.handed == counter.done + 1:
            return
        text = (
            f"micro-batches of window {counter.index} were taken before the backwards of earlier ones had "
            "run, and accumulator=pe.Exact(slots=...) sums those of a slot in order: run the backward of "
            "each before the next one is taken, and where there is none run "
            "`with sync.micro_batch(count=0): pass`"
        )
        if text not in self.counts.refusals:
            self.refuse(text)

    def _refuse_wrong(self, made: MicroBatch) -> None:
        """Refuse the window if gradients of a micro-batch came too late, or were not scaled."""
        has_new = bool(self.marks.changed())
        if made._has_last and has_new:
            self.refuse(
                f"a gradient came after mb.last_backward of micro-batch {made._index}: mark the backward "
                "that is the last, or leave the mark out"
            )
        scaler = self.scaler
        if self.batch is not None:
            self.has_backward |= has_new or made._has_last
            return  # another rank may have the losses: `Totals.is_unscaled`
        if scaler is not None and not scaler.has_scaled and (made._has_last or has_new):
            self.refuse(
                f"the losses of micro-batch {made._index} were not scaled, and sync.scaler is set: call "
                "sync.scaler.scale(loss).backward(), or sync.backward(loss), which scales"
            )

    # ---- losses and counts ----

    def due_count(self, count: Count | None) -> Count:
        """Return the count of the micro-batch about to run: the caller's, the one read ahead, or 1."""
        counter, known = self.counter, self.known_denominators()
        if known is None:
            return checked_count(1 if count is None else count)
        if count is not None:
            raise ValueError(
                f"count={count!r}: this window's counts were read ahead by sync.windows(loader, count=...); "
                "leave it out here"
            )
        if counter.state is State.OPEN and counter.done >= counter.handed:
            raise RuntimeError(
                f"backward after the backwards of all {counter.handed} micro-batches handed out, each of "
                "which is counted once: add several losses up, or give them as a dict"
            )
        return known.take(counter.done, handed=counter.handed)

    def known_denominators(self) -> Denominators | None:
        """Return the window's totals, unless it is over and another one is about to open."""
        return None if self.counter.state in (State.IDLE, State.USED) else self.denominators

    def refuse_scaled(self, loss: Tensor | GradientEdge) -> None:
        """Raise ValueError if a loss was multiplied by a loss scale already, which `backward` does."""
        scaler = self.scaler
        is_first = self.counter.index == self._first_window
        if (scaler is None and not is_first) or not is_scaled(
            loss, None if scaler is None else scaler.scale_tensor, by_any=is_first
        ):
            return
        if scaler is None:
            raise ValueError(
                "assign the loss scaler, sync.scaler = scaler, and give sync.backward the loss itself, "
                "without scaler.scale: a GradScaler that the engine does not know has scaled this loss, and "
                "nobody would unscale the gradients"
            )
        raise ValueError(
            "give sync.backward (or mb.backward) the loss itself, without scaler.scale: it was scaled "
            "already, and with sync.scaler set the engine scales it once more. In a micro_batch block call "
            "sync.scaler.scale(loss).backward()"
        )

    def warn_of_division(self, loss: Tensor, count: object) -> None:
        """Warn once, in the first window, of a loss that was divided by the micro-batches of a window."""
        accumulate = self.counter.accumulate
        if self.counter.index or accumulate == 1 or "division" in self.warned:
            return
        divisor = divided_by(loss, {accumulate, accumulate * self.comm.world_size}, count)
        if divisor is not None:
            self.warned.add("division")
            warnings.warn(
                f"leave the division by {divisor} out of the loss, if it stands for accumulate={accumulate}: "
                "the engine divides by what all micro-batches count, and with both the gradient is that much "
                "too small. (Where it is something else, such as the size of a batch, the loss is right.)",
                stacklevel=3,
            )

    def warn_of_reduction(self, loss: Tensor, count: Count | None) -> None:
        """Warn once, in the first window, of a sum without its count, and of a mean with one."""
        if self.counter.index or "reduction" in self.warned or self.denominators is not None:
            return
        reduction = reduction_of(loss)
        if reduction == "sum" and count is None:
            remedy = "pass the number of its items, count=, or let the loss be a mean"
        elif reduction == "mean" and isinstance(count, int | float) and count > 1:
            remedy = "leave count= out, or let the loss be a sum (reduction='sum')"
        else:
            return
        self.warned.add("reduction")
        how, size = ("without a count", "large") if count is None else (f"with count={count}", "small")
        warnings.warn(
            f"{remedy}: the loss is a {reduction}, as torch's loss function has returned it, {how}. The "
            f"engine divides by counts, so the gradient would be that many times too {size}",
            stacklevel=3,
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"parameter {names[0]!r}{more}"


def _written_text(names: Sequence[str]) -> str:
    return (
        f"delete optimizer.step(), since sync.step steps: {_listed(names)} was written to inside the window, "
        "between its first backward and its step, and may differ between ranks now: load a checkpoint. "
        "(load_state_dict, weights of an average, a clamp or any other write belongs behind sync.step)"
    )


def _stranger_text(names: Sequence[str]) -> str:
    return (
        f"make the engine anew (sync.close() first) or freeze {names[0]!r} again: {_listed(names)} was "
        "frozen or not there when the engine was made, and has a gradient that nobody reduces. (Or make the "
        "engine while all are trainable, and freeze them afterwards)"
    )


@dataclass(frozen=True)
class Stepped:
    """An optimizer that has been stepped with a window."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    done: OptimizerStep  # as ranks compare it
    indices: Collection[int]  # of the parameters that it has stepped


class MicroBatch:
    """One micro-batch of a window, while its backwards run; made by `sync.micro_batch`.

    Its gradient is the sum of those of the backwards in the block. A block without a backward contributes
    zero gradient, but its count is still added.
    """

    def __init__(self, engine: Engine, count: Count, *, is_stated: bool) -> None:
        counter = engine.counter
        counter.check_backward()
        self._engine = engine
        # Its index among this rank's, and whether it is the window's last.
        self._index, self._syncs = counter.done, counter.next_backward_syncs
        # Whether its gradients are accumulated with it, and not with those of a later one of its run.
        self._ends_run = self._syncs or engine.is_padding or engine.runs.ends_at(counter.latest)
        self._count: Count = count
        self._is_stated = is_stated or engine.denominators is not None
        self._loss: Tensor | None = None
        # Whether a backward was marked as the last, and whether no code but the engine's runs in the block.
        self._has_last = self._has_only = False

    @property
    def count(self) -> Count:
        """Items in the losses: a number or a 0-dim tensor; may be set until the last backward begins."""
        return self._count

    @count.setter
    def count(self, count: Count) -> None:
        self._check_open("count")
        if self._engine.denominators is not None:
            raise ValueError(
                "mb.count: this window's counts were read ahead by sync.windows(loader, count=...): leave it"
            )
        self._count, self._is_stated = checked_count(count), True

    @property
    def loss(self) -> Tensor | None:
        """Sum of the losses, for the `StepRecord`: None, or 0-dim; may be set until the last backward begins.

        Kept detached. Where one micro-batch of a window leaves it at None, the record's loss is None.
        """
        return self._loss

    @loss.setter
    def loss(self, loss: Tensor | float | None) -> None:
        self._check_open("loss")
        if loss is None or isinstance(loss, Tensor):
            value = loss
        elif isinstance(loss, int | float) and not isinstance(loss, bool):
            value = torch.tensor(loss, dtype=torch.float64, device=HOST)
        else:
            raise TypeError(f"mb.loss = a {type(loss).__name__}: need a 0-dim tensor, a number or None")
        if value is not None and value.dim() != 0:
            raise ValueError(f"mb.loss has shape {list(value.shape)}, need a 0-dim tensor: use loss.sum()")
        self._loss = None if value is None else value.detach()
        self._engine.has_backward |= value is not None

    def backward(
        self,
        loss: Tensor,
        *,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Run one of the block's backwards, on the scaled loss where `sync.scaler` is set.

        The same as `loss.backward(...)`, or `sync.scaler.scale(loss).backward(...)`, for code that does not
        know which.

        Args:
            loss: 0-dim, or of the shape of `gradient`; `count` and `loss` of the micro-batch stay as set.
            gradient, retain_graph, create_graph, inputs: as `torch.Tensor.backward`.

        Raises:
            ValueError: no backward can start here; nothing has run.
        """
        run = checked_backward(
            loss, gradient=gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )
        self._engine.refuse_scaled(loss)
        self._engine.warn_of_division(loss, self._count if self._is_stated else None)
        scaler = self._engine.scaler
        self._engine.has_backward = True
        run(loss if scaler is None else scaler.scale(loss))

    @contextmanager
    def last_backward(self, *roots: Tensor) -> Iterator[None]:
        """Mark the backward in the body as the block's last.

        In the window's last micro-batch the header is launched first, and each bucket as soon as the body has
        completed it; in an earlier one gradients are accumulated from inside it, while the cache has them. So
        `count` and `loss` are final here, and no gradient may come after the body.

        Args:
            roots: the tensors from which the body's backward starts (the scaled losses, or any tensors behind
                the same graph). Without them nothing overlaps in an engine's very first last backward.

        Raises:
            RuntimeError: the second one of a block; or a gradient came again after its bucket could leave.
        """
        if self._has_last:
            raise RuntimeError(
                "mb.last_backward: the second one of this micro-batch, whose gradients have been "
                "accumulated: mark the last backward only"
            )
        for root in roots:
            if root.dim() == 0:
                self._engine.warn_of_division(root, self._count if self._is_stated else None)
        with self._engine.last_backward(self, roots):
            yield
        self._engine.marks.record()

    def only_backward(self, root: Tensor) -> AbstractContextManager[None]:
        """As `last_backward`, where no code but the engine's runs in the rest of the block."""
        self._has_only = True
        return self._engine.last_backward(self, (root,))

    def _check_open(self, what: str) -> None:
        if self._has_last:
            raise RuntimeError(
                f"mb.{what} is set after the last backward has begun, when the header may have gone: set it "
                "before"
            )


# ---- how an engine is made ----


def make_engine(
    named: Sequence[tuple[str, Parameter]],
    ranks: EngineRanks | ShardedRanks,
    settings: Settings,
    make_reducer: Callable[[list[ParamSpec], Terms], Reducer],
    *,
    source: object,
    problems: Sequence[str],
) -> Engine:
    """Make an engine over parameters, or raise the problems of any rank on every rank: nothing has changed.

    `make_reducer` makes the owner of the gradients, once all ranks have agreed; `source` is the module that
    has the parameters, if there is one; `problems` are further ones of this rank.
    """
    comm = ranks.comm
    if settings.watches_stalls:
        comm.watch_stalls(float(settings.stall_after_s or 0.0))
    try:
        specs = ranks.specs(named)
        model = source if isinstance(source, nn.Module) else None
        found = [
            *problems_of(named, settings, takes_shards=ranks.takes_dtensors),
            *problems,
            *owned_problems(named),
            *in_backward_problems(named),
            *ranks.problems_with(named, settings),
            *problems_of_exact(source, settings),
        ]
        shares = agree(comm, specs, settings, found, ranks.membership)
        reducer = make_reducer(specs, Terms(shares.terms, shares.most_terms))
        batch = ranks.membership.shared_batch
        engine = Engine(reducer, comm, settings, shares=shares, batch=batch, module=model)
    except BaseException:
        comm.release()
        raise
    whereabouts = weakref.WeakMethod(engine.whereabouts)  # the stall watch must not keep the engine alive
    comm.report_position(lambda: _FREED if (find := whereabouts()) is None else find())
    return engine
