"""The engine, which runs the phases of a window in order: collectives, optimizer step, error handling.

[Note: order of collectives in a window]
torch.distributed pairs the collectives of a process group by their order on each rank, so all ranks have to
launch the same collectives in the same order. The following list gives a window's collectives on the engine's
own group ("engine") and on the groups over which gradients are summed ("buckets"):

 1. engine   before the first forward, only if ranks need information from other ranks: the header of
             `check_ranks_agree`, `sum_over_ranks` of counts that are read ahead, or `max_of` for the
             collective forwards of FSDP2. Between windows: the header of `check_same_call`, and then the
             gathers of the call that this header checks.
 2. FSDP2    all-gathers in every forward and backward, on the meshes of the FSDP units; reduce-scatters in
             the window's last backward only, unless the `defer` setting changes this.
 3. engine   if the host runs ahead and has not read the previous window's outcome (its verdict): gathers,
             only for a window that failed (`Verdict.reach`).
 4. engine   the header all-reduce.
 5. buckets  each bucket's reduction, in the order of the layout; if a bucket has several collectives, each
             subsequent collective is launched when the next bucket starts. Under FSDP2 buckets follow the
             order of the FSDP units in the backward.
 6. buckets  the flags of used parameters (`UsedAnywhere.all_reduce`), on a separate group for the
             hosts if there is one; left out if the header says that every rank has used all of its
             parameters. Then the broadcast of DDP's buffers.
 7. engine   once in an engine's life, the order in which gradients arrived.
 8. engine   in `wait`: the norm, if ranks hold different elements (`ShardedNorm`); the sums of
             `sync.measure`; the audit's checksums; the gathers of error texts, if the window failed.
 9. engine   in each call that clips or returns norms by name, if ranks hold different elements: the norm
             again (`Engine.renew_norm`), preceded by a header unless the host runs ahead of the device.

The order is the same on every rank for two reasons. First, on the engine's group every collective is launched
at a point of the program that all ranks reach, and whether it is launched depends only on reduced numbers or
on arguments that ranks have compared. Second, buckets are launched in the order of the layout rather than the
order in which they are completed, which depends on autograd. If the host waits for collectives, a bucket is
launched only after the header has arrived, which happens earlier on some ranks than on others, so buckets
have a separate process group (`Comm.with_own_group`). If a stream waits instead, no host has to read the
header, and a single group keeps the order.

After an exception `Reducer.give_up` launches the missing collectives with values that make the window invalid
on every rank. If the host knows without waiting for a device that headers differ between ranks, it launches
no further collective, because the buckets of another engine would have different sizes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.audit.auditor import AuditError
from pyengine.comm.base import Comm, Unbroken
from pyengine.data.rng import set_rng_states
from pyengine.engine.backward import BeforeBackward
from pyengine.engine.foreign_writes import ForeignWrites
from pyengine.engine.handshake import WindowSplit
from pyengine.engine.kept_grads import KeptGrads
from pyengine.engine.loss_checks import LossChecks
from pyengine.engine.micro_batch import MicroBatch
from pyengine.engine.parameters import Ownership
from pyengine.engine.snapshot import identify
from pyengine.engine.window import Stepped, Window
from pyengine.engine.window_record import WindowRecords
from pyengine.gradients.base import Reducer
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings
from pyengine.ops.capture import report as report_uncapturable
from pyengine.ops.device import flush, is_lazy, runs_ahead
from pyengine.ops.trace import span
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.step_record import Clock
from pyengine.step.window_optimizer import OptimizerCheck
from pyengine.window.counter import Slots, State, WindowCounter
from pyengine.window.denominators import Denominators
from pyengine.window.digest import HeaderDigest
from pyengine.window.faults import FaultKind
from pyengine.window.final_pass import FinalPass, ShardedNorm
from pyengine.window.header import (
    Count,
    Header,
    LocalWindow,
    SharedBatch,
    Totals,
    checked_count,
    make_local_window,
)
from pyengine.window.metric import Metric, MetricContext
from pyengine.window.observer import ReducedWindow, WindowObserver
from pyengine.window.verdict import (
    Outcome,
    Verdict,
    VerdictQueue,
    WindowReport,
    call_all,
    check_agreement,
)

_log = logging.getLogger("pyengine.engine")

# The stage of a rank that sends a window, for the error of ranks that disagree.
_SENDS = "sends a window"


class Engine:
    """The engine of `GradSync` and `attach`; it owns the gradients and runs one window after another.

    Methods appear in the order in which they are called; `window` contains the state of the open window.

    =================================  ==================  ==================================================
    method                             state of `counter`  [Note: order of collectives in a window]
    =================================  ==================  ==================================================
    `open`                             IDLE → OPEN         after `close_window` of the previous window
    `next_micro_batch`, `pad`,                             1, 2
    `end_micro_batches`
    `begin`                                                before the first backward
    `micro_batch`, `last_backward`
    `launch_header`, `launch`          OPEN → SENT         3 to 7
    `wait`                             SENT → REDUCED      8
    `step`, or `release_grads`         REDUCED → USED
    `close_window`                     USED → IDLE
    =================================  ==================  ==================================================

    `run_again` (captured_windows.py) replaces the methods from `begin` to `step` for a window whose device
    work runs as a graph.

    A window ends with one of four calls:
      `step`: an optimizer uses the gradients (with `release_grads` the caller uses them).
      `flush`: the engine reduces the gradients without a last backward, after any number of micro-batches;
          the gradients are then used as with `step`.
      `abandon`: this rank drops the window, but still waits for launched collectives, because other ranks
          wait for this rank. If an exception interrupted a last backward after the window's header was sent,
          every rank drops the window.
      `close_window`: the loop has finished the window, and the next window may open; raises an error if the
          gradients of the window were not used.
    """

    def __init__(
        self,
        reducer: Reducer,
        comm: Comm,
        settings: Settings,
        *,
        split: WindowSplit,
        batch: SharedBatch | None,
        module: nn.Module | None,
    ) -> None:
        names, params = reducer.names, reducer.params
        held = f"{len(params)} parameters, the first {names[0]!r}"
        if reducer.counted is not None:  # ranks may hold different parameters
            held = f"parts of a model on {comm.world_size} ranks"
        # ---- identity and configuration ----
        # The name of the engine, the same on all of its ranks.
        self.name = f"{held} (engine {split.engine_id % 2**32:08x})"
        self.device = device = params[0].device
        self.reducer, self.comm = reducer, comm
        # The module that contains the parameters; None if the engine was created from parameters.
        self.module = module
        # The batch that this rank shares with other ranks; None if every rank has a separate batch.
        self.batch = batch
        # How a full window is divided among ranks.
        self.split = split
        self.is_exact = settings.kind == "exact"
        # Whether ranks share batches or hold different elements of the parameters.
        self.holds_parts = batch is not None or reducer.counted is not None
        # The settings and parameters that a loaded state must match.
        self.identity = identify(settings.kind, split.terms, split.slot_size, names, reducer.local_params())
        # Whether a gradient with inf or nan raises an error.
        self.raises = settings.raises
        # Whether the device is an XLA device, where recording operations is cheaper than reading values.
        self.is_lazy = is_lazy(device)
        # Whether the device runs asynchronously, so that the host reads a window's outcome during the next
        # window.
        self.runs_ahead = runs_ahead(device)
        self.is_late = not settings.raises and self.runs_ahead

        # ---- position in the loop ----
        self.counter = WindowCounter(settings.accumulate, share=split.of(comm.rank))
        # The index of the last opened window, or the index in a state that was loaded later.
        self.opened_at = -1
        # Whether the last loop over `windows` has ended and no new loop has begun.
        self.is_between_loops = False
        # The states of random generators from a loaded state. The next window restores them when it opens; a
        # loop without a window restores them at its end.
        self.rng_due: dict[str, Any] = {}
        # A lock that the running micro-batch holds, in whichever thread it runs.
        self._running = Lock()

        # ---- gradients and parameters ----
        # Gradients that no optimizer has used, which are carried into the next window.
        self.kept_grads = KeptGrads(names, params)
        # The gradients in `.grad`, for example after the reduction.
        self.published = Published(names, params)
        # Detects writes to gradients and parameters by code outside the engine.
        self.foreign = ForeignWrites(reducer, module, self.published, self.kept_grads)
        # The norm and the finite flags of the mean gradients.
        norm = None if reducer.counted is None else ShardedNorm(reducer.counted, comm, device)
        self.final = FinalPass(len(params), device, norm)
        self.scaler: GradScaler | None = None
        self.ownership = Ownership(params, self)

        # ---- observers of windows ----
        # The outcomes (verdicts) of this window and earlier windows, and the number of steps taken.
        self.verdicts = VerdictQueue(device)
        self.loss_checks = LossChecks(self.counter, comm.world_size)
        # The metrics of `sync.measure`, and the audit.
        self.observers: list[WindowObserver] = []
        # The names of all ranks' parameters; set by the first call that returns or records norms by name.
        self.metric_context: MetricContext | None = None
        self.records = WindowRecords()
        # The number of items that `retry_smaller` runs at once; None for the whole micro-batch.
        self.part_size: int | None = None

        # ---- the open window, or the last window ----
        # Creates the record of a window's counts and losses.
        most = split.micro_batches if self.is_exact else math.inf
        self.new_counts = make_local_window(
            device, is_exact=self.is_exact, max_micro_batches=most, batch=batch
        )
        self.window = self.new_window()
        _log.debug("make a %s of %s", type(reducer).__name__, self.name)
        flush(device)

    # ---- open ----

    def new_window(self) -> Window:
        """Replace the last window with a new window and return it."""
        self.window = Window(self.new_counts(), Slots(self.split.slot_size), self.comm.traffic)
        self.final.reset()
        self.foreign.open_window()
        return self.window

    def open(self) -> None:
        """Open a window; the previous window must have been used."""
        self.close_window()
        self.opened_at = self.counter.index
        window = self.new_window()
        self.counter.open()
        self.ownership.follow()
        self.reducer.open()
        # Check before any forward, because FSDP2 swaps parameters during a forward.
        for problem in self.foreign.trained.problems():
            window.faults.refuse(problem)
        self.restore_rng()

    def restore_rng(self) -> None:
        """Restore the random generators of a loaded state, if they have not been restored yet."""
        if self.rng_due:
            set_rng_states(self.rng_due)
            self.rng_due = {}

    def next_micro_batch(self, place: int, *, last: bool, has_more: bool) -> None:
        """Record that the loop receives a micro-batch of data.

        `last`: whether the micro-batch ends the window. `has_more`: whether the loader has data for another
        window.
        """
        self.counter.hand_out(place, last=last)
        self.window.has_more, self.window.is_padding = has_more, False

    def pad(self, *, last: bool) -> None:
        """Record that the loop receives a padding micro-batch, because other ranks run a micro-batch."""
        assert self.reducer.padding is not None
        self.end_slot()
        self.counter.pad(last=last)
        self.window.is_padding = True
        self.reducer.padding.begin()

    def end_micro_batches(self) -> None:
        """Record that the loop receives no further micro-batch; pending backwards may still follow.

        If no micro-batch is pending, for example in an empty window, wait for the reductions here, so that
        `.grad` is the mean on this rank, too.
        """
        self.counter.is_exhausted = True
        if not self.counter.has_micro_batch_out and self.counter.state is not State.IDLE:
            self.wait()

    # ---- accumulate ----

    def begin(self, *, may_replace: bool = False) -> None:
        """Begin the window with zero sums, and record an error if other code has written to gradients.

        Called before every micro-batch, and before the reduction of a window without micro-batches.
        `may_replace`: whether the next backwards may replace `.grad` tensors, which would hide replacements
        by other code.
        """
        window = self.window
        if window.has_begun:
            self.refuse_foreign_writes()
            if may_replace:
                self._refuse_each(self.foreign.replaced_in_window())
            return
        if found := self.foreign.between_windows():  # a nonzero gradient would be lost
            window.faults.refuse(*found)
        window.clock = Clock(self.device)
        self.kept_grads.keep()
        self.reducer.begin()
        for observer in self.observers:
            observer.begin(self.counter.index)
        window.has_begun = True
        self.foreign.begin_window(self._refuse_hook)

    @contextmanager
    def micro_batch(
        self, count: Count, *, is_stated: bool, may_replace: bool, loss: Tensor | None = None
    ) -> Iterator[MicroBatch]:
        """Run the body as one micro-batch, in which the caller runs the backwards; then accumulate gradients.

        Launch the reductions of the window if this is its last micro-batch and no backward was marked as the
        last. `may_replace`: see `begin`. `loss` is used in the step record and in error messages, and may be
        set later.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "backward while another backward of this engine is running, in another thread or around this "
                "call: a window's micro-batches run one after another. In `with sync.micro_batch():` call "
                "loss.backward() itself; with several threads, create an engine per thread or add the losses"
            )
        try:
            window = self.window
            micro_batch = MicroBatch(
                window,
                self.counter,
                count,
                loss,
                is_stated=is_stated,
                scaler=self.scaler,
                loss_checks=self.loss_checks,
                last_backward=self._last_backward_of_block,
            )
            self.begin(may_replace=may_replace)
            if window.slots.size > 1:
                self._refuse_other_turn()
            for observer in self.observers:
                observer.begin_micro_batch()
            try:
                guard: AbstractContextManager[object] = nullcontext()
                padding = self.reducer.padding if window.is_padding else None
                if padding is not None:  # padding's backwards must not change other gradients
                    padding.preserve_grads(())
                    guard = BeforeBackward(padding.preserve_grads)
                with window.clock.phase("backward"), guard:
                    yield micro_batch
                    if not micro_batch.has_only:
                        self._refuse_late_or_unscaled(micro_batch)
                    if not micro_batch.has_last:
                        self._count_micro_batch(micro_batch)
                        if micro_batch.ends_slot:
                            self.reducer.collect()
                if may_replace:
                    self.reducer.grad_record.follow_replaced()
                if micro_batch.syncs and self.counter.state is State.OPEN:
                    self.launch()
            except BaseException as error:
                if self.counter.state is State.OPEN:
                    window.faults.refuse(
                        f"micro-batch {micro_batch.index} was left by an exception ({error!r}), so its "
                        "gradient may be incomplete"
                    )
                raise
            finally:
                self.foreign.marks.record()
        finally:
            self._running.release()

    def last_backward(self, micro_batch: MicroBatch, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Run the last backward of a micro-batch in the body, and accumulate gradients during this backward.

        In the window's last micro-batch, launch the header before the backward, and the reduction of each
        bucket as soon as the bucket is complete.
        """
        micro_batch.has_last = self.window.has_backward = True
        if not micro_batch.has_only:
            self.reducer.grad_record.follow_replaced()  # earlier backwards may have replaced `.grad`
        self._count_micro_batch(micro_batch)
        if micro_batch.syncs and self.reducer.overlaps:
            return self._overlap(roots)
        return self.reducer.add() if micro_batch.ends_slot else self.reducer.leave_in_grad()

    @contextmanager
    def _last_backward_of_block(self, micro_batch: MicroBatch, roots: Sequence[Tensor]) -> Iterator[None]:
        """Run `last_backward` inside a `micro_batch` block; the caller's code continues afterwards."""
        with self.last_backward(micro_batch, roots):
            yield
        self.foreign.marks.record()

    @contextmanager
    def _overlap(self, roots: Sequence[Tensor]) -> Iterator[None]:
        with self.launch_header() as header, self.reducer.overlap(header, roots):
            yield

    def _count_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch. After the last micro-batch, the header may be launched."""
        window = self.window
        self.counter.count_backward()
        window.counts.is_silent |= not (micro_batch.is_stated or micro_batch.has_only)
        if not window.is_padding:
            window.counts.has_uncounted |= not micro_batch.is_stated
            window.slots.add(ends=micro_batch.ends_slot)
            micro_batch.add_to(window.counts)

    def end_slot(self) -> None:
        """Accumulate the gradients of the open slot; the slot gets no further micro-batch."""
        if self.window.slots.is_open:
            self.reducer.collect()
            self.window.slots.end()

    # ---- launch ----

    def flush(self) -> None:
        """Reduce the accumulated gradients without another backward; see `Sync.flush`."""
        self.check_idle("flush")
        if self.counter.state is State.IDLE:
            raise RuntimeError(
                "flush outside a window: there is nothing to send; open a window with sync.windows(loader)"
            )
        if self.counter.state is State.OPEN:
            self.begin()
            self.launch()
        self.wait()

    def launch(self) -> None:
        """Launch the header and the reductions after the last backward, or without any backward."""
        self.end_slot()
        with self.window.clock.phase("exposed_sync"), self.launch_header() as header:
            self.reducer.reduce(header)
        self.foreign.marks.record()

    @contextmanager
    def launch_header(self) -> Iterator[Header]:
        """Launch the header all-reduce; launch the buckets inside the `with` block."""
        window, counts, counter = self.window, self.window.counts, self.counter
        # The header contains the step of the previous window, so a host that runs ahead must first read the
        # previous window's outcome. By now every rank has launched all collectives that a forward may launch.
        self.verdicts.reach_earlier(counter.index)
        if window.denominators is not None:
            self._refuse_each(window.denominators.problems(counter.done, handed=counter.handed))
        self._refuse_each([*self.foreign.replaced_in_window(), *self.foreign.of_parameters()])
        counts.has_used_all = self.reducer.has_used_all()
        self.loss_checks.warn_of_mixed_counts(counts)
        if self.scaler is not None and window.has_backward:
            counts.has_scaled = self.scaler.has_scaled
        self.follow_scale()
        with Unbroken(self.comm):
            window.header = header = self.launch_header_all_reduce(
                counts, has_more=window.has_more, stage=_SENDS
            )
            counter.state, window.is_launching = State.SENT, True
        try:
            yield header
        except BaseException as error:
            # other ranks wait for the buckets that this rank has not launched
            _log.debug("window %d: give up after %r", counter.index, error)
            window.faults.note(FaultKind.GAVE_UP, repr(error))
            self.reducer.give_up()
            raise
        finally:
            window.is_launching = False

    def launch_header_all_reduce(self, counts: LocalWindow, *, has_more: bool, stage: str) -> Header:
        """Launch an all-reduce of this rank's position and counts, and of values that ranks must agree on.

        A header takes 184 bytes, or 232 bytes if ranks share batches.
        """
        return Header(
            self.comm,
            self.device,
            local=counts,
            position=self.position(),
            has_more=has_more,
            digest=self.header_digest(stage),
            inv_scale=None if self.scaler is None else self.scaler.inv_scale(),
        )

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that observe windows."""
        return [each for each in self.observers if isinstance(each, Metric)]

    def position(self) -> tuple[int, int]:
        """Return the numbers of windows sent and steps taken, which ranks compare in each header."""
        return self.counter.num_sent, self.verdicts.steps_taken

    def header_digest(self, stage: str = _SENDS) -> HeaderDigest:
        """Return the values in a header that must be equal on all ranks."""
        scaler = self.scaler
        settings = "" if scaler is None else scaler.settings()
        # On a lazy device, reading the loss scale would split the recorded program.
        scale = None if scaler is None or self.is_lazy else scaler.current_scale()
        kept = self.kept_grads.pending() if self.split.are_alike else ()
        use = self.verdicts.last_use()
        total = self.split.micro_batches
        return HeaderDigest(stage, self.name, settings, scale, use, self.counter.accumulate, total, kept)

    def follow_scale(self) -> None:
        """Rescale the residuals of wires after a change of the loss scale."""
        if self.reducer.residuals.is_kept:
            self.reducer.residuals.follow(self.loss_scale())

    def loss_scale(self) -> Tensor | None:
        """Return the factor by which losses are scaled, as a 0-dim tensor; None without a scaler."""
        return None if self.scaler is None else self.scaler.current_scale()

    # ---- wait ----

    def wait(self) -> Verdict:
        """Wait for the reductions, write the mean to `.grad`, and let the device decide whether it is used.

        Repeated calls in a window do nothing. Unless the device runs asynchronously, the host reads the
        outcome of the window here.

        An error on any rank is raised on every rank: by this method, or by the next `reach_verdicts` if the
        device runs asynchronously.
        """
        self.check_idle("step, clip or unscale")
        window, counter = self.window, self.counter
        if counter.state is State.OPEN and counter.is_exhausted:
            self.begin()  # some micro-batches had no backward
            self.launch()
        if not counter.is_sent:
            self.refuse_written_past()
            remedy = (
                "finish the window, or call sync.flush() to end it here"
                if counter.state is State.OPEN and counter.done
                else "call sync.backward(loss) in a window first"
            )
            raise RuntimeError(
                f"{remedy}: no synchronised gradients, because {counter.state.value} "
                f"({counter.done} of {counter.accumulate} backwards done)"
            )
        verdict = window.verdict
        if verdict is None:
            if window.header is not None and window.header.disagreement:
                raise RuntimeError(window.header.disagreement)  # found in the backward: no collective follows
            verdict = self._wait_once()
        if not self.is_late:
            self.reach_verdicts()
        if window.faults and (unusable := window.faults.first(FaultKind.UNUSABLE)):
            raise RuntimeError(unusable)
        return verdict

    def _wait_once(self) -> Verdict:
        window, header, marks = self.window, self.window.header, self.foreign.marks
        assert header is not None  # state SENT requires a header
        changed = marks.changed()
        with window.clock.phase("exposed_sync"):
            try:
                self.reducer.finish(self.final)
            except BaseException as error:
                window.faults.note(FaultKind.NOT_REDUCED, str(error) or repr(error))
                raise
            for observer in self.observers:
                observer.sample(self.loss_scale)
            has_gradient = self.is_lazy or self.published.has_any()
            has_kept = bool(self.kept_grads.pending())
            if has_kept:
                self.kept_grads.add()
                self.published.read(self.final)
            self.final.compute_norm(is_refused=header.is_refused())
        self.loss_checks.is_first_window = False
        reduced = ReducedWindow(header, window.counts, is_whole=not has_kept)
        window.verdict = verdict = self._conclude(reduced, has_gradient=has_gradient)
        if not header.was_refused:
            self.reducer.residuals.drop_if(self.final.found_inf)
        self.counter.state = State.REDUCED
        self.verdicts.append(verdict)
        if self.scaler is not None:
            self.scaler.has_scaled = False
        if not header.was_refused:
            try:
                for observer in self.observers:
                    observer.check(reduced)
            except AuditError as error:
                remedy = "No optimizer has stepped; call sync.abandon(), or restore a checkpoint"
                window.faults.note(FaultKind.UNUSABLE, f"{error}. {remedy}")
                raise
        if changed:
            with suppress(RuntimeError):  # `wait` raises it after the errors that all ranks share
                self.refuse(marks.describe(changed, "after the window's end"))
        marks.record_published()
        return verdict

    def _conclude(self, reduced: ReducedWindow, *, has_gradient: bool) -> Verdict:
        """Determine on the device whether the window is usable, and keep a report for the error message."""
        window, header = self.window, reduced.header
        self.final.forbid(header.forbids())
        observers = [] if header.is_refused() else [*self.observers]
        for observer in observers:
            limit = observer.wait(reduced)
            if limit is not None:
                # In a skipped window, inf / inf would give nan.
                self.clip(limit, self.final.grad_norm().nan_to_num(0.0, 0.0, 0.0))
        report = WindowReport(
            self.counter.index,
            window.counts,
            self.reducer.names,
            window.slots.blame(self.reducer.blame()),
            lambda: "; ".join(filter(None, (observer.reason() for observer in observers))),
            self.scaler is not None,
            window.has_backward,
            has_gradient,
        )
        outcome = Outcome.of(header, self.final)
        return Verdict(header, outcome, report, comm=self.comm, raises=self.raises)

    def reach_verdicts(self) -> None:
        """Read the outcome of every reduced window; all ranks must call this at the same point."""
        self.verdicts.reach_all()
        if self.window.verdict is not None:
            self.window.verdict.reach()  # a repeated call raises the window's error again

    # ---- use ----

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any, check: OptimizerCheck) -> Tensor:
        """Step an optimizer with the gradients unless some rank has inf or nan; see `Sync.step`.

        Callbacks receive one record per window, after its first step, in the order of the windows.
        """
        verdict, window, is_first = self.wait(), self.window, self.counter.state is not State.USED
        self._refuse_written()
        done, factors = check.of(optimizer, is_handed_over=self.kept_grads.is_handed_over)
        stepped = {index for group in done.params for index in group}
        self.foreign.trained.notice_step(stepped)
        if not self.split.are_alike:
            done = replace(done, params=())  # Parameters differ between pipeline stages.
        if self.is_late and self.reducer.stepper.needs_host(optimizer):  # Otherwise `wait` read the outcome.
            report_uncapturable(
                f"the step of {type(optimizer).__name__} waits for the host, which decides whether to skip "
                "it: create the optimizer with fused=True, and with capturable=True if it has that option"
            )
            self.reach_verdicts()
        for observer in self.observers:
            observer.step(optimizer)
        norm = self.final.norm_before_clipping()
        try:
            with span("optimizer"):
                self.reducer.stepper.step(optimizer, self.final)
            self.foreign.written.forget()  # this and later optimizers may write to parameters
        except BaseException:
            # The optimizer may have changed parameters before the exception. Record the step, so that other
            # ranks notice if this rank repeats the step.
            verdict.use.steps.append(replace(done, name=f"{done.name}, which raised,"))
            raise
        finally:
            self.update_scale()
        has_stepped = self.final.found_inf == 0
        record = self.record_of(verdict, norm) if is_first else None
        # On a lazy device ranks do not compare steps and clipping factors, because each factor would add an
        # output to the compiled program.
        if not self.is_lazy:
            verdict.use.steps.append(done)
            verdict.use.factors += [self.final.clipped, *factors]
        window.stepped.append(Stepped(optimizer, scheduler, done, stepped))
        if is_first:
            self.verdicts.count_step()
            self.counter.state = State.USED
        self.kept_grads.use(stepped, self.final.found_inf)
        self.foreign.marks.record_published()
        if self.is_lazy:
            flush(self.device)
        self.call_once_known(verdict, scheduler, record)
        return has_stepped

    def call_once_known(
        self, verdict: Verdict, scheduler: Any, record: Callable[[Totals, bool], None] | None
    ) -> None:
        """Step the scheduler and create the record as soon as the host knows the window's outcome.

        The gradients count as used even if the scheduler or a callback raises an exception.
        """
        actions: list[Callable[[], None]] = []
        if scheduler is not None:
            actions.append(partial(verdict.once_known, lambda skips: None if skips else scheduler.step()))
        if record is not None:
            actions.append(partial(verdict.then, record, awaits=bool(self.records.callbacks)))
        if actions:
            call_all(actions)

    def record_of(self, verdict: Verdict, norm: Tensor) -> Callable[[Totals, bool], None]:
        """Return a function that creates the record of the window and passes it to the callbacks."""
        return self.records.of(
            self.window,
            verdict,
            norm,
            metrics=self.metrics,
            traffic=self.comm.traffic,
            held_bytes=self.reducer.held_bytes,
        )

    def release_grads(self) -> None:
        """Leave the gradients to the caller; the next window keeps gradients that are not zeroed."""
        verdict = self.wait()
        self._refuse_written()
        self.foreign.written.forget()
        verdict.use.is_handed_over = True
        self.update_scale()
        self.kept_grads.hand_over()
        flush(self.device)

    def update_scale(self) -> None:
        """Update the loss scale from the outcome of the window, once per window."""
        if self.scaler is not None and not self.window.is_scale_updated:
            self.scaler.follow()
            self.window.is_scale_updated = True

    # ---- close, or abandon ----

    @property
    def is_closed(self) -> bool:
        """Whether no window is open, and an optimizer or the caller has used the last gradients."""
        return self.counter.state in (State.IDLE, State.USED) or (
            self.counter.is_sent and self.kept_grads.is_used
        )

    def close_window(self) -> None:
        """Close the window; raise RuntimeError if it was not reduced or its gradients were not used."""
        counter = self.counter
        if counter.state is State.OPEN:
            self.refuse_written_past()
            raise RuntimeError(
                f"window {counter.index} was left after {counter.done} backwards and never sent: call "
                "sync.flush() and sync.step() to use it, or sync.abandon() to drop it"
            )
        failure = self.window.faults.first(FaultKind.NOT_REDUCED)
        if failure and self.comm.world_size > 1:
            raise RuntimeError(
                f"the gradients of window {counter.index} were not reduced on this rank ({failure}): "
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
        """Whether the window is incomplete or unusable; a new loop then abandons it."""
        return self.counter.state is State.OPEN or self.window.is_broken

    def abandon(self, *, waits: bool = True) -> None:
        """Drop the window on this rank, and return the engine to its state between windows.

        Before the header is launched, this does not affect other ranks, and the next window gets the same
        index. After the launch this rank still waits for the reductions (unless `waits` is False), because
        other ranks wait for this rank.
        """
        window = self.window
        if waits:
            self.check_idle("abandon")
            # No collective follows a header in which ranks disagree.
            is_over = window.header is not None and bool(window.header.disagreement)
            if self.counter.state is State.SENT and not is_over:
                try:
                    self.wait()
                except (ValueError, FloatingPointError, RuntimeError):
                    # Ignore the error: other ranks raise it, and this rank drops the window anyway. With
                    # several ranks, the error of a broken collective is still raised.
                    if window.verdict is None and self.comm.world_size > 1:
                        raise
            if window.verdict is not None and not window.verdict.was_refused:
                self.update_scale()  # Other ranks update the loss scale in their `step`.
                if not self.is_closed:  # Discard the residuals of an unused window.
                    self.reducer.residuals.drop_if(torch.ones((), dtype=torch.float32, device=self.device))
            flush(self.device)
        _log.debug("window %d: abandon, %s", self.counter.index, self.counter.state.value)
        header = window.header if window.verdict is None else window.verdict
        was_refused = header is not None and header.was_refused  # a refused window is not counted
        self.counter.close(completed=self.counter.is_sent and not was_refused)
        self.kept_grads.clear()
        self.reducer.abandon()
        self.foreign.marks.record_published()
        self.new_window()

    # ---- norms and clipping ----

    @property
    def is_void(self) -> bool:
        """Whether the host knows that some rank has dropped this window.

        A rank that has dropped the window may make different calls from the remaining ranks. Therefore no
        collective follows, and the norm stays nan.
        """
        return not self.is_late and bool(self.final.void != 0)

    def renew_norm(self, stage: str, *, has_changed: bool = False) -> None:
        """Compute the norm again if gradients were changed or replaced after the last computation.

        If ranks hold different elements, this is a collective, preceded by a header all-reduce unless the
        host runs ahead of the device. If a rank has already left the window, it sends the header of the next
        window instead, and all ranks raise an error.

        Args:
            stage: the purpose of the collective, for error messages.
            has_changed: whether to treat the gradients as changed even if their versions are the same.
        """
        if self.is_void:
            return
        with Unbroken(self.comm) if self.final.is_shared else nullcontext():
            if self.final.is_shared and not self.runs_ahead:
                header = self.launch_header_all_reduce(self.new_counts(), has_more=False, stage=stage)
                check_agreement(header, header.totals(), self.comm)
            if has_changed := has_changed or self.published.has_changed():
                self.published.read(self.final)
                self.published.record()
            self.final.renew_norm(was_read=has_changed)

    def renew_norm_alone(self) -> None:
        """Recompute the norm as `renew_norm` does, but only if this rank can do so without a collective."""
        if not self.final.is_shared:
            self.renew_norm("reads the norm")
        elif self.reducer.holds_all and not self.is_void and self.published.has_changed():
            self.published.read(self.final)
            self.published.record()
            self.final.renew_norm_alone()

    def clip(self, max_norm: float | Tensor, norm: Tensor) -> None:
        """Multiply the gradients by min(1, max_norm / norm), unless the host sees that this factor is 1."""
        factor = self.final.clip(max_norm, norm)
        if self.is_late or self.runs_ahead or float(factor) != 1:
            self.published.scale_(factor.float())
            self.foreign.marks.record_published()

    # ---- outside of the loop ----

    def whereabouts(self) -> str:
        """Describe the engine's position in its loop; any thread may call this."""
        counter, gave_up = self.counter, self.window.faults.first(FaultKind.GAVE_UP)
        left = f", left by {gave_up}" if gave_up else ""
        return (
            f"step {self.verdicts.steps_taken}, window {counter.index}, micro-batch {counter.handed} of "
            f"{counter.accumulate} ({counter.state.value}{left})"
        )

    def close(self) -> None:
        """Release the parameters and drop an open window, without a collective."""
        counter = self.counter
        if counter.state is State.OPEN and counter.done:
            warnings.warn(
                f"close: {counter.done} micro-batches of window {counter.index} were accumulated but never "
                "stepped; to use them, call sync.flush() and sync.step(optimizer) before close",
                stacklevel=3,
            )
        if self.is_late:
            self.verdicts.read_all()
        keeps = self.kept_grads.is_handed_over and not self.window.stepped
        self.abandon(waits=False)
        for observer in self.observers:
            observer.release()
        self.reducer.release(keeps_grad=keeps)
        self.ownership.release()
        self.comm.release()
        if self.scaler is not None:
            self.scaler.unbind()

    # ---- errors ----

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if a micro-batch is running."""
        if self._running.locked():  # in any thread
            raise RuntimeError(
                f"{what} while a micro-batch of this engine is running: leave the sync.micro_batch block "
                "first"
            )

    def refuse(self, text: str) -> None:
        """Make every rank raise an error for this window, or only this rank if the header was launched."""
        if self.counter.state is State.OPEN:
            self.window.faults.refuse(text)
            return
        text = (
            f"{text}. This rank cannot use the window: fix this, then call sync.abandon() on every rank. "
            "(A rank without this error may have stepped; the next window reports that)"
        )
        self.window.faults.note(FaultKind.UNUSABLE, text)
        raise RuntimeError(text)

    def _refuse_each(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.window.faults.refuse(text)

    def refuse_foreign_writes(self) -> None:
        """Make the window fail if other code has written to its gradients since the last micro-batch."""
        if self.window.has_begun and self.counter.state is State.OPEN and (text := self.foreign.in_window()):
            self.refuse(text)
            self.foreign.marks.record()

    def refuse_written_past(self) -> None:
        """Raise RuntimeError if code outside the engine has written to gradients since the last check."""
        if self.window.has_begun and self.counter.state is State.OPEN:
            text = self.foreign.in_window()
        else:
            found = self.foreign.between_windows()
            text = found[0] if found is not None and (found[1] is None or bool(found[1])) else ""
        if text:
            raise RuntimeError(f"{text}. sync.step has not used these gradients")

    def _refuse_written(self) -> None:
        """Raise RuntimeError if other code has written to parameters between the reduction and the step."""
        for problem in self.foreign.of_parameters():
            text = f"{problem}. sync.step has not stepped an optimizer on this rank"
            self.window.faults.note(FaultKind.UNUSABLE, text)
            raise RuntimeError(text)

    def notice_backward(self, param: Parameter) -> None:
        """Warn once if a training loop runs backwards without using this engine."""
        if not self._running.locked():
            self.foreign.notice_backward(param, self.name)

    def _refuse_hook(self, text: str, param: Tensor) -> None:
        """Make the window fail because a hook wrote to a parameter or gradient during a backward.

        If the header has been launched, set the gradient to nan, so that every rank drops the window; the
        error is raised later, with the outcome of the window.
        """
        if self.window.is_launching:
            self.window.faults.refuse(text)
            param.grad = torch.full_like(param, torch.nan)
        elif self.counter.state in (State.OPEN, State.SENT):
            self.refuse(text)

    def _refuse_other_turn(self) -> None:
        """Make the window fail if backwards run out of order, because slots are summed in order."""
        counter = self.counter
        if counter.handed == counter.done + 1:
            return
        text = (
            f"micro-batches of window {counter.index} were read before the backwards of earlier "
            "micro-batches had run, and accumulator=pe.Exact(slots=...) sums the micro-batches of a slot in "
            "order: run the backward of each micro-batch before the next is read, and use `with "
            "sync.micro_batch(count=0): pass` for a micro-batch without a backward"
        )
        if text not in self.window.faults.refusals():
            self.refuse(text)

    def _refuse_late_or_unscaled(self, micro_batch: MicroBatch) -> None:
        """Make the window fail if gradients of a micro-batch arrived too late or were not scaled."""
        has_new = bool(self.foreign.marks.changed())
        if micro_batch.has_last and has_new:
            self.refuse(
                f"a gradient was accumulated after mb.last_backward of micro-batch {micro_batch.index}: put "
                "mb.last_backward around the last backward, or leave it out"
            )
        scaler = self.scaler
        if self.batch is not None:
            self.window.has_backward |= has_new or micro_batch.has_last
            return  # another rank may have the losses: see `Totals.is_unscaled`
        if scaler is not None and not scaler.has_scaled and (micro_batch.has_last or has_new):
            self.refuse(
                f"the losses of micro-batch {micro_batch.index} were not scaled, but sync.scaler is set: "
                "call sync.scaler.scale(loss).backward(), or sync.backward(loss), which scales the loss"
            )

    # ---- counts ----

    def due_count(self, count: Count | None, known: Denominators | None) -> Count:
        """Return the next micro-batch's count: the given count, the count that was read ahead, or 1.

        `known`: the counts that were read ahead, from `known_denominators`.
        """
        counter = self.counter
        if known is None:
            return 1 if count is None else checked_count(count)
        if count is not None:
            raise ValueError(
                f"count={count!r}: this window's counts were read ahead by sync.windows(loader, count=...); "
                "leave it out here"
            )
        if counter.state is State.OPEN and counter.done >= counter.handed:
            raise RuntimeError(
                f"backward was called more often than micro-batches were read ({counter.handed}); call it "
                "once per micro-batch: add up the losses of a micro-batch, or pass them as a dict"
            )
        return known.take(counter.done, handed=counter.handed)

    def known_denominators(self) -> Denominators | None:
        """Return the counts that were read ahead for the open window, or None."""
        known = self.window.denominators
        return None if known is None or self.counter.state in (State.IDLE, State.USED) else known
