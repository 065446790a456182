"""Engines: how they are made, and what happens between their windows."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from pyengine.checkpoint.snapshot import Snapshot, identify
from pyengine.comm.base import Comm
from pyengine.data.rng import set_rng_states
from pyengine.engine.batch_norm import BatchNormReplay, batch_norm_problems
from pyengine.engine.batch_norm import batch_norms as batch_norms_of
from pyengine.engine.engine_ranks import EngineRanks, ShardedRanks
from pyengine.engine.handshake import Shares, agree, narrow_problems, problems_of, resized
from pyengine.engine.parameters import Ownership, in_backward_problems, owned_problems
from pyengine.engine.window import Window
from pyengine.gradients.base import Reducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.marks import REMEDY
from pyengine.gradients.settings import Settings
from pyengine.ops.device import flush, is_lazy
from pyengine.window.counter import State
from pyengine.window.shared_batch import SharedBatch
from pyengine.window.verdict import check_agreement

_log = logging.getLogger("pyengine.engine")


class Engine:
    """The engine behind `GradSync` and `attach`: it owns the gradients of parameters, opens one window after
    the other, and resumes them. What happens in a window is in `Window`.

    Args:
        reducer: owns the gradients.
        comm: transport over all ranks of the engine.
        settings: this rank's arguments.
        batch_norms: the replay of running statistics.
        shares: how a full window is divided among ranks.
        batch: the batch that this rank shares with others; None where every rank has its own.
        module: the model, where it is known.
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
        self.window = window = Window(
            reducer, comm, settings, batch_norms, shares=shares, batch=batch, module=module
        )
        # ---- the window's, here by shorter names ----
        self.reducer, self.comm, self.batch_norms, self.batch = reducer, comm, batch_norms, batch
        self.counter, self.device, self.final = window.counter, window.device, window.final
        self.verdicts, self.kept_grads = window.verdicts, window.kept_grads
        # ---- the engine's own ----
        # How a full window is divided among ranks.
        self.shares = shares
        self.is_exact = settings.kind == "exact"
        # Whether ranks share batches, or sum parts of other ranks' parameters: then no rank can load another
        # one's state.
        self.holds_parts = batch is not None or reducer.saves_local_sums
        # What a state has to fit.
        self.identity = identify(
            settings.kind,
            shares.terms,
            shares.run,
            batch_norms.num_modules,
            reducer.names,
            reducer.local_params(),
        )
        self._ownership = Ownership(reducer.params, self)
        _log.debug("make a %s of %s", type(reducer).__name__, window.name)
        # The version of a parameter at the last backward past this engine.
        self._bare_version: int | None = None
        # The index of the window that was opened last.
        self._opened_at = -1
        # Whether a loop over `windows` has run out and no other one has begun.
        self.is_between_loops = False
        # Loaded states of random generators, which the next window sets.
        self.rng_due: dict[str, Any] = {}
        flush(self.device)

    def open(self) -> None:
        """Open a window, or continue the one that was resumed; the previous one must have been used."""
        if not self.counter.is_resumed:
            self.window.close()
            self._opened_at = self.counter.index
        self._bare_version = None
        self._ownership.follow()
        self.window.open()
        if self.rng_due:
            set_rng_states(self.rng_due)
            self.rng_due = {}

    def flush(self) -> None:
        """Launch and reduce what has been accumulated; see `Window.flush`."""
        self.window.check_idle("flush")
        if self.counter.is_resumed:
            self.open()
        self.window.flush()
        self.window.wait()

    def notice_backward(self, param: Parameter) -> None:
        """Warn once where a loop trains past this engine: no window has opened between two backwards that are
        not the engine's, and an optimizer has written to the parameter.
        """
        if self.window.is_running:
            return
        version, before = param._version, self._bare_version
        self._bare_version = version
        if before not in (None, version) and "bare" not in self.window.warned:
            self.window.warned.add("bare")
            warnings.warn(
                f"{REMEDY}; call sync.step(optimizer) in place of optimizer.step(): {self.window.name} are "
                "trained past their engine, on gradients of this rank alone. (Call sync.close() where that "
                "is meant)",
                stacklevel=2,
            )

    def refuse_bare_gradients(self) -> None:
        """Raise RuntimeError if a backward past the engine has left gradients, and no window is open."""
        if self.window.is_closed and not self.kept_grads.is_handed_over:
            self.window.refuse_written_past()

    def compare(self) -> None:
        """Raise on every rank unless all have used the last window alike; every rank calls this between
        windows.

        The header of a window states how the one before was used, and no header follows the last.

        Cost: one all-reduce of 184 bytes, for which the host waits; nothing on a lazy device, nor alone.

        Raises:
            RuntimeError: ranks have stepped, clipped or scaled differently, or are at different places.
        """
        if self.comm.world_size > 1 and not is_lazy(self.device):
            header = self.window.launch_header_all_reduce(
                self.window.new_counts(), more=False, stage="has ended its loop"
            )
            check_agreement(header, header.totals(), self.comm)

    def is_still_needed(self) -> bool:
        """Whether another rank still needs this one: for a window that was dropped before it was sent,
        or further ones.
        """
        return self.counter.index == self._opened_at or self.verdicts.some_rank_has_more()

    def resize(self, accumulate: int) -> None:
        """Let windows have another size from the next one on; every rank calls this with the same number."""
        if not self.window.is_closed:
            raise RuntimeError(
                f"gradient_accumulation_steps={accumulate} in the middle of window {self.counter.index}, "
                "or before its step: set it behind a step, or drop the window by sync.abandon() first"
            )
        self.shares = resized(self.shares, accumulate, is_exact=self.is_exact)
        self.counter.accumulate, self.counter.share = accumulate, self.shares.of(self.comm.rank)

    def resume(self, part: Snapshot, *, due: Sequence[int] | None) -> None:
        """Continue from a snapshot, whose sums are loaded at the first backward.

        Args:
            part: of this rank; the engine owns the gradients that it carries over, and only reads its sums.
            due: places that this rank has still to compute in the snapshot's open window; None if no window
                is open.
        """
        _log.debug("window %d: resume, %d micro-batches done", part.window, len(part.places))
        self.counter.go_to(part.window)
        self.window.reset(part if due is not None else None)
        self.kept_grads.load(part.carry, is_open=due is not None)
        self._load_residuals(part)
        self.window.marks.record()
        self.verdicts.restart(part.steps)
        self._opened_at = part.window
        if due is not None:
            self.counter.resume(part.places, due)
        self.rng_due = {} if part.is_between_loops else part.rng  # set behind what the loader has drawn
        if part.is_between_loops:
            set_rng_states(part.rng)  # before the loader draws
        flush(self.device)

    def _load_residuals(self, part: Snapshot) -> None:
        if self.reducer.residuals.is_kept:
            self.reducer.residuals.load(part.residuals)
        elif part.residuals:
            warnings.warn(
                "load_state_dict: the state has residuals, of a wire that keeps what it loses, and this "
                "engine's wire does not: they are lost, as a window's rounding is without them",
                stacklevel=4,
            )

    def close(self) -> None:
        """Release the parameters, without a collective; what is open is abandoned."""
        counter = self.counter
        if counter.state is State.OPEN and counter.done:
            text = (
                f"close: {counter.done} micro-batches of window {counter.index} had been accumulated and "
                "were never stepped"
            )
            warnings.warn(f"{text}; sync.flush() and sync.step(optimizer) use them", stacklevel=3)
        if self.window.is_late:
            self.verdicts.read_all()
        keeps = self.kept_grads.is_used and self.counter.state is not State.USED
        self.window.abandon(waits=False)
        self.batch_norms.release()
        self.reducer.release(keeps_grad=keeps)
        self._ownership.release()
        self.comm.release()
        if self.window.scaler is not None:
            self.window.scaler.unbind()
        if self.window.audit is not None:
            self.window.audit.drop()


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
    """Make an engine over parameters, or raise the problems of any rank on every rank.

    Args:
        named: the parameters, in registration order.
        comm: transport; every rank of it calls this.
        settings: this rank's arguments.
        make_reducer: makes the owner of the gradients from the parameters' descriptions and the terms of a
            full window's sum; called once all ranks have agreed.
        source: the module, if there is one, that has them.
        problems: further ones of this rank.
        ranks: which ranks share which gradients and batches; None: all ranks hold the same.

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
    """Return a function that describes the engine's position to any thread, and does not keep it alive."""
    ref = weakref.ref(engine)

    def describe() -> str:
        engine = ref()
        if engine is None:
            return "the end of its engine"
        counter, gave_up = engine.counter, engine.window.gave_up
        return (
            f"step {engine.verdicts.steps_taken}, window {counter.index}, micro-batch {counter.handed} of "
            f"{counter.accumulate} ({counter.state.value}{f', left by {gave_up}' if gave_up else ''})"
        )

    return describe
