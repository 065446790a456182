"""The public loop: windows of micro-batches whose gradients travel once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pyengine.dealer import Dealer
from pyengine.engine import Engine
from pyengine.header import Count, Totals
from pyengine.host import Readback
from pyengine.loop import Batch, micro_batch, windows
from pyengine.norm import GradScaler
from pyengine.optimizer import Ownership, WindowOptimizer
from pyengine.record import Recorder, StepRecord
from pyengine.restore import put, take
from pyengine.trace import span
from pyengine.verdict import Verdict
from pyengine.window import State


class Sync:
    """Windows, counts and the step over gradients that somebody owns; made by `GradSync` and `attach`.

    Example:
        >>> for window in sync.windows(loader):                      # doctest: +SKIP
        ...     for x, y in window:
        ...         loss = cross_entropy(model(x), y, reduction="sum")
        ...         sync.backward(loss, count=y.numel())
        ...     sync.clip_grad_norm_(1.0)
        ...     sync.step(optimizer, scheduler)
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recorder = Recorder()
        self._ownership = Ownership(engine.reducer.params)
        self._scaler: GradScaler | None = None
        self._done: list[int] = []

    @property
    def is_sync_step(self) -> bool:
        """Whether the window gets no further micro-batch: this is its last one, it has none left, or it was flushed."""
        return self._engine.window.ends

    @property
    def window(self) -> int:
        """Index of the window, from 0; it goes up when the next one begins."""
        return self._engine.window.index

    @property
    def place(self) -> int:
        """Index, in its window over all ranks, of the micro-batch handed out last; see `pe.micro_batch_rng`."""
        places = self._engine.window.places
        if not places:
            raise RuntimeError("place: no micro-batch has been handed out in this window")
        return places[-1]

    @property
    def due(self) -> list[int]:
        """Places of the window's micro-batches that this rank is still to compute, for `WindowSampler.set_epoch`."""
        window = self._engine.window
        return list(window.due if window.state is State.OPEN else window.share)

    @property
    def done(self) -> list[int]:
        """Places that were done on any rank when `load_state_dict` was called, for `Dealer.set_epoch`."""
        return list(self._done)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, or None. Assign a `pe.GradScaler` to train in fp16; `backward` scales, `step` updates."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"scaler is a {type(scaler).__name__}: need a pyengine.GradScaler (same arguments and state as "
                "torch.amp.GradScaler), which takes its finite check from the engine"
            )
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        if enabled is not None:
            enabled.bind(self._engine.final)
            self._engine.comm.launch()
        self._scaler, self._engine.scaler = scaler, enabled

    def windows(self, loader: Iterable[Batch] | Dealer) -> Iterator[Iterator[Any]]:
        """Cut a loader into windows of `accumulate` micro-batches; the last one may be shorter.

        Ranks may have different numbers of micro-batches and of windows: one that has run out goes on with empty
        windows, in which it contributes zeros, until all have. The loader is read one micro-batch ahead. A `Dealer` has
        cut its windows already, and deals their micro-batches to whoever is free.

        Yields:
            One iterator of micro-batches a window. Every micro-batch handed out counts; its backward may run later
            (several forwards first), or never (it then contributes nothing).
        """
        return windows(self._engine, loader)

    def accumulate(self, *, last: bool = False) -> AbstractContextManager[None]:
        """Wrap one micro-batch of a loop that cannot be nested: forward, backward, and a step that may be a no-op.

        Args:
            last: end the window with this micro-batch, however short it is (the end of the data).

        An exception in the body abandons the window on this rank and goes on.
        """
        return micro_batch(self._engine, last=last)

    def backward(self, loss: Tensor, *, count: Count = 1) -> None:
        """Run the backward of one micro-batch; the window's last one also reduces, overlapped.

        Args:
            loss: 0-dim, summed over the micro-batch's items; or their mean, with `count` left at 1.
            count: items in `loss`: a number or a 0-dim tensor (never read on the host). The window's gradient is
                divided by the sum of counts over all ranks and micro-batches. 0 adds nothing to that sum.

        Raises:
            RuntimeError: outside a window, or after the window was sent.
        """
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss: got {shape}, need a 0-dim tensor; reduce it with sum (count=items) or mean"
            )
        if isinstance(count, Tensor) and count.numel() != 1:
            raise ValueError(
                f"count: got a tensor of shape {list(count.shape)}, need one number; use count.sum()"
            )
        self._engine.backward(loss, count)

    def flush(self) -> None:
        """End the window here: reduce what has been accumulated, without another forward or backward."""
        self._engine.flush()

    def unscale_(self) -> None:
        """Write everything pending (1/count, loss scale, clipping) into `.grad`, which is then yours.

        Gradients that you do not zero are carried into the next window, as in a plain PyTorch loop.
        """
        self._engine.hand_over()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Fold min(1, max_norm / norm) into the step and return the norm before clipping; no pass of its own.

        Args:
            max_norm: the largest allowed 2-norm of the mean gradient.

        Returns:
            The 2-norm over all parameters and ranks, float64, 0-dim; the same bits on every rank.
        """
        self._engine.finish()
        return self._engine.final.clip(max_norm)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients, clipping included; float64, 0-dim. Costs nothing."""
        self._engine.finish()
        return self._engine.final.grad_norm()

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Tensor:
        """Step the optimizer with the window's gradients, unless they were not finite on some rank.

        A fused optimizer takes 1/count, loss scale and clipping through `grad_scale` (no pass over the gradients); any
        other gets one fused write before it. The next window starts from zero gradients. Several optimizers over one
        engine are stepped one after the other.

        On an accelerator a fused optimizer decides on the device and the host does not wait: the scheduler's step, the
        StepRecord and errors follow when the next window is sent, when the loop over `windows` runs out, or at
        `synchronize()`, whichever comes first.

        Args:
            optimizer: over parameters of this engine.
            scheduler: stepped once, if the optimizer was.

        Returns:
            Whether the parameters changed, bool, 0-dim, on their device; the same on every rank. Looking at it waits.
        """
        engine = self._engine
        verdict = engine.finish()
        self._ownership.check(optimizer)
        stepper = engine.reducer.stepper
        if stepper.needs_host(optimizer):
            engine.settle()
        first = not engine.is_used
        if engine.scaler is not None and first:
            engine.scaler.unscale_(optimizer)
        norm = engine.final.norm_before_clipping()
        try:
            with span("optimizer"):
                stepper.step(optimizer, engine.final, engine.write)
        finally:
            if engine.scaler is not None and first:
                engine.scaler.update()
        stepped = engine.final.found_inf == 0
        if scheduler is not None:
            verdict.once_known(lambda skips: None if skips else scheduler.step())
        if first:
            self._report(verdict, norm)
        engine.used()
        return stepped

    def synchronize(self) -> None:
        """Wait for the outcome of the last step: its scheduler steps, its StepRecord is emitted, its errors are raised.

        Needed only on accelerators, after the last window of a loop that does not use `windows` or was left by `break`,
        or before the scheduler's state is read. Every rank calls it at the same point.
        """
        self._engine.settle()

    def wrap(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> WindowOptimizer:
        """Return an optimizer whose `step` and `zero_grad` do nothing except where a window ends."""
        return WindowOptimizer(self, optimizer, scheduler)

    def abandon(self) -> None:
        """Drop the current window on this rank, after an exception, say; the next one starts clean."""
        self._engine.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's engine holds, also in the middle of a window, as tensors and plain values.

        That is: windows and steps completed, the sums, counts, losses and running statistics of the open window's
        micro-batches that are done here, with their places; the loss scale, gradients carried over, and the states of
        the random generators. Parameters, optimizer and scheduler are the caller's to save, as ever. On an accelerator
        every rank calls this at the same point, as `synchronize`.

        With accumulator="exact" the last states of any ranks in a window fit together, whenever each was saved.

        Raises:
            RuntimeError: between a micro-batch's hand-out and its backward (so also after one that had no backward, for
                the rest of the window), or between the window's last backward and the step.

        Cost: copies the sums: 4 bytes an element, 8 for "exact".
        """
        return take(self._engine).to_dict()

    def load_state_dict(self, states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` was called, bit for bit; every rank calls this before its loop.

        Args:
            states: this rank's own state, on as many ranks as there were; or, with accumulator="exact", a list of the
                states of all ranks, the same on every rank, whose sums and remaining micro-batches are then shared out
                among the ranks there are now. All of one window, that of the parameters (`state["window"]`). A state
                may be missing, or older than others that hold its micro-batches: what is missing is computed again.

        Nothing of a rank's own is needed but its loader, which goes on behind what is done: `sampler.set_epoch(...,
        due=sync.due)`, or `dealer.set_epoch(..., done=sync.done)`. The generators go on from where they were when the
        loop takes the first micro-batch, if this rank's own state of as many ranks is there. (The loader reads one
        micro-batch ahead: what it draws in this process from them is not repeated; see `pe.sample_rng`.) What has to be
        alike on every world size starts from `pe.micro_batch_rng`.

        Raises:
            ValueError: a state does not fit, or ranks got different ones; on every rank, and nothing has changed.

        Example:
            >>> states = [torch.load(path) for path in sorted(folder.glob("sync-*.pt"))]  # doctest: +SKIP
            >>> sync.load_state_dict([s for s in states if s["window"] == window])  # doctest: +SKIP
            >>> sampler.set_epoch(0, window=window, due=sync.due)  # doctest: +SKIP
        """
        self._done = put(self._engine, states)

    def on_step(self, callback: Callable[[StepRecord], None]) -> Callable[[StepRecord], None]:
        """Call `callback(record)` after every optimizer step; usable as a decorator."""
        self._recorder.callbacks.append(callback)
        return callback

    def _report(self, verdict: Verdict, norm: Tensor) -> None:
        """Count and record the step once its outcome is known."""
        engine, clock = self._engine, self._engine.clock
        traffic, (collectives, sent) = engine.comm.traffic, engine.traffic_before
        collectives, sent = traffic.collectives - collectives, traffic.bytes_sent - sent
        # Also where nobody listens: ranks whose programs differ cannot meet.
        index, grad_norm = engine.window.index, Readback(norm.reshape(1))
        clock.stop()

        def emit(totals: Totals, skips: bool) -> None:
            if not self._recorder.callbacks:
                return  # the seconds would wait for the device
            self._recorder.emit(
                step=index,
                micro_batches=totals.micro_batches,
                count=totals.count,
                loss=totals.loss / totals.count if totals.count else None,
                grad_norm=grad_norm.get()[0],
                skipped=skips,
                reason=verdict.reason,
                bytes_on_wire=sent,
                collectives=collectives,
                backward_s=clock.seconds("backward"),
                exposed_sync_s=clock.seconds("exposed_sync"),
                step_s=clock.elapsed(),
            )

        verdict.then(emit, awaits=bool(self._recorder.callbacks))
