"""Windows one after the other: opened, left, dropped, resumed, on every rank alike."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.data.rng import set_rng_states
from pyengine.engine.batch_norm import BatchNormReplay, batch_norm_problems
from pyengine.engine.batch_norm import batch_norms as batch_norms_of
from pyengine.engine.checkpoint.snapshot import Snapshot, identify
from pyengine.engine.engine_ranks import EngineRanks, ShardedRanks
from pyengine.engine.handshake import Shares, agree, narrow_problems, problems_of, resized
from pyengine.engine.open_window import OpenWindow
from pyengine.engine.ownership import Ownership, owned_problems
from pyengine.engine.parts import make_parts
from pyengine.engine.trained import TrainedParameters, in_backward_problems
from pyengine.gradients.base import Reducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.marks import BARE
from pyengine.gradients.settings import Settings
from pyengine.ops.device import flush, is_lazy, runs_ahead
from pyengine.step.step_record import StepCallback
from pyengine.step.window_optimizer import OptimizerCheck
from pyengine.window.counter import State, WindowCounter
from pyengine.window.shared_batch import SharedBatch
from pyengine.window.verdict import Verdict, check_agreement


class Engine:
    """A window after the other, behind `GradSync` and `attach`; what happens in one is `OpenWindow`'s.

    Attributes:
        counter: where ranks stand, and in which state the window is.
        current: the window that is open, or was last.
        parts: what its windows share, the loss scaler among it.
        reducer, comm, batch_norms, kept_grads, final, verdicts, device: see `Parts`.
        is_late: whether the host lets the device run ahead, and learns of a window's outcome in the next one.
        identity: what a state has to fit.
        is_exact: whether sums are exact.
        shares: how a full window is dealt out.
        batch: the batch that this rank shares with others; None where every rank has its own.
        holds_parts: whether ranks share batches, or sum parts of other ranks' parameters.
        is_between_loops: whether a loop over `windows` has run out and no other one has begun.
        rng_due: loaded states of generators that the next window will set.
    """

    def __init__(
        self,
        reducer: Reducer,
        comm: Comm,
        settings: Settings,
        batch_norms: BatchNormReplay,
        *,
        shares: Shares,
        batch: SharedBatch | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.reducer, self.comm, self.batch_norms = reducer, comm, batch_norms
        self.shares, self.batch = shares, batch
        self.holds_parts = batch is not None or reducer.saves_parts
        self.counter = WindowCounter(settings.accumulate, share=shares.of(comm.rank))
        self.is_exact = settings.kind == "exact"
        self.device = device = reducer.params[0].device
        names, params = reducer.names, reducer.params
        self.identity = identify(
            settings.kind, shares.terms, shares.run, batch_norms.num_modules, names, reducer.local_params()
        )
        self.parts = parts = make_parts(reducer, comm, settings, self.counter, batch_norms, shares, batch)
        self.final, self.verdicts, self.kept_grads = parts.final, parts.verdicts, parts.kept_grads
        self.is_late = not settings.raises and runs_ahead(device)
        self._opened_at = -1
        self._bare_version: int | None = None  # of a parameter, at the last backward past this engine
        self.is_between_loops = False
        self.rng_due: dict[str, Any] = {}
        self._ownership = Ownership(params, self)
        self._trained = TrainedParameters(names, params, module)
        self._running = Lock()
        self.current = OpenWindow(self.parts)
        flush(device)

    def open(self) -> None:
        """Open a window, or go on with the one that was resumed; the previous one must have been used."""
        if self.counter.is_resumed:
            self.counter.is_resumed = False
        else:
            self.close_window()
            self.current = OpenWindow(self.parts)
            self._opened_at = self.counter.index
            self.counter.open()
        self._bare_version = None
        self._ownership.follow()
        self.reducer.open()
        # Here, before any forward: FSDP2 shows other parameters from then on.
        self.current.counts.refusals += self._trained.problems()
        self.batch_norms.open()
        if (resumed := self.current.resumed) is not None:
            self.batch_norms.load(resumed.places, resumed.batch_norm)
        if self.rng_due:
            set_rng_states(self.rng_due)
            self.rng_due = {}

    def hand_out(self, place: int, *, last: bool, more: bool) -> None:
        """Count a micro-batch given to the loop; `more` says that another window follows the current one."""
        self.counter.hand_out(place, last=last)
        self.current.has_more_windows, self.current.is_padding = more, False
        self.batch_norms.hand_out(place)
        self.reducer.before_forward(syncs=last)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the body be the one micro-batch that runs.

        Raises:
            RuntimeError: another one is running.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "backward while another backward of this engine is running, in another thread or around "
                "this one: a window's micro-batches run one after the other; in `with sync.micro_batch():` "
                "call loss.backward() itself; give each thread an engine of its own, or add the losses up"
            )
        try:
            yield
        finally:
            self._running.release()

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError while a micro-batch runs."""
        if self._running.locked():
            raise RuntimeError(
                f"{what} while a micro-batch of this engine is running: leave the block of sync.micro_batch "
                "first"
            )

    def notice_backward(self, param: Parameter) -> None:
        """Warn once where a loop trains past this engine: no window has opened between two backwards that are
        not the engine's, and an optimizer has written to the parameter.
        """
        if self._running.locked():
            return
        version, before = param._version, self._bare_version
        self._bare_version = version
        if before not in (None, version) and "bare" not in self.parts.warned:
            self.parts.warned.add("bare")
            warnings.warn(
                f"{BARE}; call sync.step(optimizer) in place of optimizer.step(): {self.parts.name} are "
                "trained past their engine, on gradients of this rank alone. (Call sync.close() where that "
                "is meant)",
                stacklevel=2,
            )

    def refuse_bare_gradients(self) -> None:
        """Raise RuntimeError if a backward past the engine has left gradients, and no window is open."""
        if self.is_between_windows and not self.kept_grads.is_handed_over:
            self._refuse_written_past()

    def _refuse_written_past(self) -> None:
        found = self.current.written_past()
        if found is not None and found[1]:
            raise RuntimeError(f"{found[0]}. Nothing was stepped")

    def exhaust(self) -> None:
        """Note the end of the window's loop; backwards that are still due may follow."""
        self.counter.is_exhausted = True
        if self.counter.is_sent:
            self.finish()

    def flush(self) -> None:
        """Send what has been accumulated, without a backward. Does nothing if the window has been sent.

        Raises:
            RuntimeError: no window is open.
        """
        self.check_idle("flush")
        if self.counter.state is State.IDLE:
            raise RuntimeError(
                "flush outside a window: there is nothing to send; open one with sync.windows(loader)"
            )
        if self.counter.is_resumed:
            self.open()
        if self.counter.state is State.OPEN:
            self.current.begin()
            self.current.send()

    def finish(self) -> Verdict:
        """Let the window land: `.grad` is the mean, and the host learns the outcome unless it is late.

        Raises:
            RuntimeError: the window has not been sent.
            ValueError, FloatingPointError, RuntimeError: what any rank got wrong, on every rank; late that
                happens at the next `reach_verdicts`.
        """
        self.check_idle("step, clip or unscale")
        if self.counter.state is State.OPEN and self.counter.is_exhausted:
            self.flush()  # some micro-batches had no backward
        if not self.counter.is_sent:
            self._refuse_written_past()
            remedy = (
                "finish the window, or call sync.flush() to end it here"
                if self.counter.state is State.OPEN and self.counter.done
                else "call sync.backward(loss) in a window first"
            )
            raise RuntimeError(
                f"{remedy}: no synchronised gradients: {self.counter.state.value} "
                f"({self.counter.done} of {self.counter.accumulate} backwards done)"
            )
        verdict = self.current.land()
        if not self.is_late:
            self.reach_verdicts()
        if self.current.unusable:
            raise RuntimeError(self.current.unusable)
        return verdict

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        check: OptimizerCheck,
        callbacks: Collection[StepCallback],
    ) -> Tensor:
        """Let an optimizer use the window; see `OpenWindow.step`.

        Args:
            optimizer, scheduler, callbacks: as there.
            check: says what is about to be stepped, or refuses it.
        """
        self.finish()
        done, factors = check.of(optimizer, is_handed_over=self.kept_grads.is_handed_over)
        stepped = {index for group in done.params for index in group}
        self._trained.notice_step(stepped)
        if not self.shares.are_alike:
            done = replace(done, params=())  # other stages have others
        if self.is_late and self.reducer.stepper.needs_host(optimizer):  # else `finish` has waited
            self.reach_verdicts()
        return self.current.step(optimizer, scheduler, (done, factors), stepped, callbacks)

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor, 0-dim; where the host may look and sees 1, there is no pass."""
        if self.is_late or runs_ahead(self.device) or float(factor) != 1:
            self.parts.published.scale_(factor.float())
            self.parts.published.mark()

    def reach_verdicts(self) -> None:
        """Learn the outcome of every window that landed; every rank calls this at the same point.

        Raises:
            RuntimeError, ValueError, FloatingPointError: as `Verdict.reach`, each time until the window is
            dropped.
        """
        self.verdicts.reach_all()
        if self.current.verdict is not None:
            self.current.verdict.reach()  # raises again what was wrong with it

    def compare(self) -> None:
        """Raise on every rank unless all have used the last window alike; every rank calls this between
        windows.

        The header of a window tells how the one before was used, and no header follows the last.

        Cost: one all-reduce of 184 bytes, for which the host waits; nothing on a lazy device, nor alone.

        Raises:
            RuntimeError: ranks have stepped, clipped or scaled differently, or are at different places.
        """
        if self.comm.world_size > 1 and not is_lazy(self.device):
            header = self.parts.send_header(self.parts.new_counts(), more=False, stage="has ended its loop")
            check_agreement(header, header.totals(), self.comm)

    def is_still_needed(self) -> bool:
        """Whether another rank still needs this one: for a window that was dropped before it was sent,
        or further ones.
        """
        return self.counter.index == self._opened_at or self.verdicts.some_rank_has_more()

    def unscale_(self) -> None:
        """Leave the window's gradients to the caller; what is left of them counts into the next window."""
        self.finish()
        self.batch_norms.apply(self.final.found_inf == 0)
        self.kept_grads.hand_over()
        flush(self.device)

    @property
    def is_between_windows(self) -> bool:
        """Whether no window is open, and the last one's gradients have been used or are the caller's."""
        return self.counter.state in (State.IDLE, State.USED) or (
            self.counter.is_sent and self.kept_grads.is_used
        )

    def close_window(self) -> None:
        """Close the window.

        Raises:
            RuntimeError: it was never sent, or nobody used its gradients.
        """
        counter = self.counter
        if counter.state is State.OPEN:
            self._refuse_written_past()
            raise RuntimeError(
                f"window {counter.index} was left after {counter.done} backwards and never sent: call "
                "sync.flush() and sync.step to use it, or sync.abandon() to drop it"
            )
        if not self.is_between_windows:
            raise RuntimeError(
                f"the gradients of window {counter.index} were reduced and never used: call "
                "sync.step(optimizer), or sync.unscale_() to use .grad yourself, or sync.abandon()"
            )
        counter.close(completed=counter.is_sent)

    def abandon_unfinished(self) -> None:
        """Abandon a window that an exception left half-way, or that was refused: a new loop begins."""
        current = self.current
        refused = current.verdict is not None and current.verdict.error is not None
        left = self.counter.state is State.OPEN and not self.counter.is_resumed
        if left or current.gave_up or current.unusable or refused:
            self.abandon()

    def abandon(self) -> None:
        """Drop the current window on this rank; the engine is clean afterwards.

        Before the window was sent, nobody notices: the next window takes its place. Afterwards this rank
        still waits for the reductions it owes the others.
        """
        self.check_idle("abandon")
        current = self.current
        if self.counter.state is State.SENT:
            try:
                self.finish()
            except (ValueError, FloatingPointError, RuntimeError):
                # The others learn what was wrong with it; here the window goes anyway. What broke a
                # collective stays.
                if current.verdict is None:
                    raise
        if current.verdict is not None and not current.verdict.was_refused:
            current.follow_scale()  # the others update theirs when they step
        flush(self.device)
        self.drop()

    def drop(self) -> None:
        """Drop the current window without waiting for anybody."""
        self.batch_norms.close()
        current = self.current
        said = current.header if current.verdict is None else current.verdict
        was_refused = said is not None and said.was_refused  # no window of all ranks
        self.counter.close(completed=self.counter.is_sent and not was_refused)
        self.kept_grads.clear()
        self.parts.marks.release()
        self.parts.marks.take()
        self.current = OpenWindow(self.parts)

    def close(self) -> None:
        """Give the parameters up; nobody is asked or waited for."""
        counter = self.counter
        if counter.state is State.OPEN and counter.done:
            text = (
                f"close: {counter.done} micro-batches of window {counter.index} had been accumulated and "
                "were never stepped"
            )
            warnings.warn(f"{text}; sync.flush() and sync.step(optimizer) use them", stacklevel=3)
        if self.is_late:
            self.verdicts.read_all()
        keeps = self.kept_grads.is_used and self.counter.state is not State.USED
        self.drop()
        self.batch_norms.release()
        self.reducer.release(keeps_grad=keeps)
        self._ownership.release()
        self.comm.release()
        if self.parts.scaler is not None:
            self.parts.scaler.unbind()
        if self.parts.audit is not None:
            self.parts.audit.drop()

    def resize(self, accumulate: int) -> None:
        """Let windows have another size from the next one on; every rank calls this with the same number."""
        if not self.is_between_windows:
            raise RuntimeError(
                f"gradient_accumulation_steps={accumulate} in the middle of window {self.counter.index}, "
                "or before its step: set it behind a step, or drop the window by sync.abandon() first"
            )
        self.shares = resized(self.shares, accumulate, is_exact=self.is_exact)
        self.counter.accumulate, self.counter.share = accumulate, self.shares.of(self.comm.rank)

    def _load_residuals(self, part: Snapshot) -> None:
        if self.reducer.residuals.is_kept:
            self.reducer.residuals.load(part.residuals)
        elif part.residuals:
            warnings.warn(
                "load_state_dict: the state has residuals, of a wire that keeps what it loses, and this "
                "engine's wire does not: they are lost, as a window's rounding is without them",
                stacklevel=4,
            )

    def resume(self, part: Snapshot, *, due: Sequence[int] | None) -> None:
        """Go on from a snapshot, whose sums are loaded at the first backward.

        Args:
            part: what is this rank's now; the gradients that it carries over are the engine's from here on,
                its sums are only read.
            due: places that this rank has still to compute in the window that is open in it; None if none is.
        """
        self.counter.go_to(part.window)
        self.current = OpenWindow(self.parts, part if due is not None else None)
        self.kept_grads.load(part.carry, is_open=due is not None)
        self._load_residuals(part)
        self.parts.marks.take()
        self.verdicts.restart(part.steps)
        self._opened_at = part.window
        if due is not None:
            self.counter.resume(part.places, due)
        self.rng_due = {} if part.is_between_loops else part.rng  # set behind what the loader has drawn
        if part.is_between_loops:
            set_rng_states(part.rng)  # before the loader draws
        flush(self.device)


# ---- how an engine is made ----


def make_engine(
    named: Sequence[tuple[str, Parameter]],
    comm: Comm,
    settings: Settings,
    make_reducer: Callable[[list[ParamSpec], Terms], Reducer],
    *,
    source: object,
    problems: Sequence[str],
    ranks: EngineRanks | ShardedRanks | None = None,
) -> Engine:
    """Make an engine over parameters, or raise on every rank what any rank has to complain of.

    Args:
        named: the parameters, in registration order.
        comm: transport; every rank of it calls this.
        settings: this rank's arguments.
        make_reducer: given the parameters' descriptions and the terms of a full window's sum,
            return who owns the gradients; called once all ranks have agreed.
        source: the module, if there is one, that has them.
        problems: what else is wrong here.
        ranks: which ranks share what, where that is not everything.

    Raises:
        ValueError: an argument or a parameter is off, or ranks differ; on every rank, and nothing has
            changed.
    """
    if settings.watches_stalls:
        comm.watch_stalls(float(settings.stall_after_s or 0.0))
    try:
        specs = [ParamSpec.of(name, param) for name, param in named] if ranks is None else ranks.specs(named)
        is_exact = settings.kind == "exact"
        model = source if isinstance(source, nn.Module) else None
        module = model if is_exact and model is not None else nn.Module()
        takes_shards = ranks is not None and ranks.takes_dtensors
        found = [
            *problems_of(named, takes_shards=takes_shards),
            *narrow_problems(named, settings),
            *problems,
            *owned_problems(named),
            *in_backward_problems(named),
        ]
        found += batch_norm_problems(module)
        if ranks is not None:
            found += ranks.problems_with(named, settings, num_batch_norms=len(batch_norms_of(module)))
        shares = agree(comm, specs, settings, found, None if ranks is None else ranks.membership)
        reducer = make_reducer(specs, Terms(shares.terms, shares.most_terms))
        batch_norms = BatchNormReplay(module, most=shares.most, total=shares.total)
        batch = None if ranks is None else ranks.shared_batch
        engine = Engine(reducer, comm, settings, batch_norms, shares=shares, batch=batch, module=model)
    except BaseException:
        comm.release()
        raise
    comm.report_position(whereabouts_of(engine))
    return engine


def whereabouts_of(engine: Engine) -> Callable[[], str]:
    """Return what tells any thread an engine's step, window and micro-batch, and does not keep it alive."""
    ref = weakref.ref(engine)

    def tell() -> str:
        engine = ref()
        if engine is None:
            return "the end of its engine"
        counter, gave_up = engine.counter, engine.current.gave_up
        return (
            f"step {engine.verdicts.steps_taken}, window {counter.index}, micro-batch {counter.handed} of "
            f"{counter.accumulate} ({counter.state.value}{f', left by {gave_up}' if gave_up else ''})"
        )

    return tell
