"""What all windows of an engine share, and how it is put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pyengine.comm.base import Comm
from pyengine.engine.batch_norm import BatchNormReplay
from pyengine.engine.handshake import Shares
from pyengine.engine.kept_grads import KeptGrads
from pyengine.engine.window_audit import WindowAudit
from pyengine.gradients.base import Reducer
from pyengine.gradients.dropping import Dropping
from pyengine.gradients.marks import GradMarks
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings
from pyengine.ops.device import is_lazy
from pyengine.step.grad_scaler import GradScaler
from pyengine.window.claims import Claims
from pyengine.window.counter import WindowCounter
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header, LocalWindow, make_local_window
from pyengine.window.holdings import Holdings
from pyengine.window.shared_batch import SharedBatch
from pyengine.window.verdict_queue import VerdictQueue


@dataclass
class Parts:
    """What all windows of an engine share.

    Attributes:
        name: of the engine, with an identity that all ranks of it have in common.
        reducer: owns the gradients.
        comm: transport.
        counter: where ranks stand, and in which state the window is.
        batch_norms: the replay of running statistics.
        kept_grads: gradients that the caller keeps from one window to the next.
        marks: tell whether somebody else has written to gradients.
        published: the gradients in `.grad` of a window that has landed.
        dropping: looks at micro-batches before they are accumulated; None where none is ever dropped.
        final: the mean gradients' norm and finite flags.
        verdicts: on this window and earlier ones, and the steps taken.
        new_counts: makes what a window's counts and losses are noted in.
        device: where the gradients lie.
        raises: whether inf and nan are an error.
        run: micro-batches of a run; see `Runs`.
        are_alike: whether all ranks have parameters of the same names.
        scaler: the loss scaler, if there is one.
        audit: compares ranks, if it was asked for.
        warned: what the user has been warned of, and will not be again.
    """

    name: str
    reducer: Reducer
    comm: Comm
    counter: WindowCounter
    batch_norms: BatchNormReplay
    kept_grads: KeptGrads
    marks: GradMarks
    published: Published
    dropping: Dropping | None
    final: FinalPass
    verdicts: VerdictQueue
    new_counts: Callable[[], LocalWindow]
    device: torch.device
    raises: bool
    run: int
    are_alike: bool
    scaler: GradScaler | None = None
    audit: WindowAudit | None = None
    warned: set[str] = field(default_factory=set)

    def send_header(self, local: LocalWindow, *, more: bool, stage: str) -> Header:
        """Launch a header: where this rank is, what it counted, and what must be alike everywhere.

        Args:
            local: this rank's counts and losses.
            more: whether it has another window after this one.
            stage: what the header is for.

        Cost: one all-reduce of 184 bytes, not waited for.
        """
        scaler, scale = self.scaler, None
        if scaler is not None and not is_lazy(self.device):
            scale = scaler.current_scale()
        settings = "" if scaler is None else scaler.settings()
        use, accumulate = self.verdicts.last_use(), self.counter.accumulate
        kept = self.kept_grads.pending() if self.are_alike else ()
        claims = Claims(stage, self.name, settings, scale, use, accumulate, kept)
        position = (self.counter.num_sent, self.verdicts.steps_taken)
        inv_scale = None if scaler is None else scaler.inv_scale()
        return Header(
            self.comm,
            self.device,
            local=local,
            position=position,
            more=more,
            claims=claims,
            inv_scale=inv_scale,
        )


def make_parts(
    reducer: Reducer,
    comm: Comm,
    settings: Settings,
    counter: WindowCounter,
    batch_norms: BatchNormReplay,
    shares: Shares,
    batch: SharedBatch | None,
) -> Parts:
    """Return what the windows of a new engine share; for the arguments see `Engine`."""
    names, params, is_exact = reducer.names, reducer.params, settings.kind == "exact"
    device = params[0].device
    counted = reducer.counted
    held = f"{len(params)} parameters, the first {names[0]!r}"
    if counted is not None:  # ranks may have others
        held = f"parts of a model on {comm.world_size} ranks"
    holdings = None if counted is None else Holdings(counted, comm, device)
    return Parts(
        name=f"{held} (engine {shares.engine_id:08x})",
        reducer=reducer,
        comm=comm,
        counter=counter,
        batch_norms=batch_norms,
        kept_grads=KeptGrads(names, params),
        marks=GradMarks(reducer),
        published=Published(names, params),
        dropping=Dropping(reducer) if settings.drops else None,
        final=FinalPass(len(params), device, holdings),
        verdicts=VerdictQueue(comm, device),
        new_counts=make_local_window(
            device,
            is_exact=is_exact,
            max_micro_batches=shares.micro_batches if is_exact else math.inf,
            batch=batch,
        ),
        device=device,
        raises=settings.raises,
        run=shares.run,
        are_alike=shares.are_alike,
    )
