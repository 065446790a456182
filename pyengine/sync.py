"""The public engine: windows of micro-batches whose gradients travel once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.accumulator import Exact
from pyengine.agreement import Settings, agree, problems_of, sparse_modules
from pyengine.batch_norm import BatchNormReplay, batch_norm_problems
from pyengine.comm import comm_for
from pyengine.ddp import DDPReducer
from pyengine.dealer import Dealer
from pyengine.engine import Engine
from pyengine.header import Count, Totals
from pyengine.hook import HookState
from pyengine.host import Readback
from pyengine.layout import Layout, ParamSpec
from pyengine.loop import Batch, micro_batch, windows
from pyengine.norm import GradScaler, apply_optimizer, decides_on_device
from pyengine.optimizer import Ownership, WindowOptimizer
from pyengine.record import Recorder, StepRecord
from pyengine.reducer import BucketReducer, Storage
from pyengine.restore import put, take
from pyengine.verdict import Verdict
from pyengine.window import State
from pyengine.wire import FP32, Wire


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
        """Whether the current micro-batch is the last of its window."""
        window = self._engine.window
        return window.state is not State.IDLE and window.is_complete

    @property
    def place(self) -> int:
        """Index, in its window over all ranks, of the micro-batch handed out last; see `pe.micro_batch_rng`."""
        places = self._engine.window.places
        if not places:
            raise RuntimeError("place: no micro-batch has been handed out in this window")
        return places[-1]

    @property
    def done(self) -> list[int]:
        """Places of the open window that were done when `load_state_dict` was called, for `WindowSampler.set_epoch`."""
        return self._done

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, or None. Assign a `pe.GradScaler` to train in fp16: `backward` scales, `step` updates."""
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
        if not decides_on_device(optimizer):
            engine.settle()
        first = not engine.is_used
        if engine.scaler is not None and first:
            engine.scaler.unscale_(optimizer)
        norm = engine.final.norm_before_clipping()
        try:
            apply_optimizer(optimizer, engine.final, engine.write)
        finally:
            if engine.scaler is not None and first:
                engine.scaler.update()
        if scheduler is not None:
            verdict.then(lambda _, skips: None if skips else scheduler.step())
        if first:
            self._report(verdict, norm)
        engine.used()
        return engine.final.found_inf == 0

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

        With accumulator="exact" every rank may save when it likes: the last states of any ranks in a window fit together.

        Raises:
            RuntimeError: between a micro-batch's hand-out and its backward, or between the window's last backward and
                the step.

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

        The open window's remaining micro-batches come from the loader: `sampler.set_epoch(epoch, window=state["window"]
        - ..., done=sync.done)` deals them out. Random generators go on only with this rank's own state of the same
        world size; what has to be alike on every world size starts from `pe.micro_batch_rng`.

        Raises:
            ValueError: a state does not fit, or ranks got different ones; on every rank, and nothing has changed.

        Example:
            >>> states = [torch.load(path) for path in sorted(folder.glob("sync-*.pt"))]  # doctest: +SKIP
            >>> sync.load_state_dict([s for s in states if s["window"] == window])  # doctest: +SKIP
            >>> sampler.set_epoch(0, window=window, done=sync.done)  # doctest: +SKIP
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
        index, grad_norm = engine.window.index, Readback(norm.reshape(1))
        clock.stop()

        def emit(totals: Totals, skips: bool) -> None:
            engine.steps_taken += not skips
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

        verdict.then(emit)


class GradSync(Sync):
    """Own the gradients of a model in flat buckets, and reduce each bucket once a window.

    Every rank makes it over the same parameters; rank 0's values (and a module's buffers) are copied to the others.

    Args:
        params_or_module: a module, or its parameters, or `(name, parameter)` pairs. All that require a gradient.
        accumulate: micro-batches a window, per rank.
        wire: how a bucket travels: `pe.wire.FP32()`, `BF16()`, `FP16()`.
        accumulator: "fp32" sums in fp32 whatever the parameters' type; "native" sums in their own type; "exact" gives the
            same bits for every world size (docs/reproducible.md), over the fp32 wire only, with whole-numbered counts;
            given a module, not its parameters, it keeps BatchNorm's running statistics alike too. `pe.Exact(
            micro_batches=...)` is the same where the window is not the sum of `accumulate` over ranks.
        group: the process group; None is the default group, or this process alone if there is none.
        bucket_cap_mb: size of a bucket in MiB of gradients.
        nonfinite: "skip" leaves the parameters alone in a step with inf or nan; "raise" raises FloatingPointError on
            every rank, and has every micro-batch checked so that the message names it.

    Raises:
        ValueError: an argument is off, or the ranks' parameters differ, or "exact" meets a SyncBatchNorm; raised on
            every rank.

    Cost: fp32 parameters need one buffer of their size, which `.grad` views. Narrow parameters with
    `accumulator="fp32"` need 4 bytes an element for the sum and their own size for the wire.
    """

    def __init__(
        self,
        params_or_module: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        *,
        accumulate: int,
        wire: Wire = FP32(),  # noqa: B008 - frozen
        accumulator: str | Exact = "fp32",
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        nonfinite: str = "skip",
    ) -> None:
        named, buffers = _named(params_or_module)
        params = [param for _, param in named]
        comm = comm_for(params[0].device, group)
        specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named]
        settings = Settings(accumulate, wire, accumulator, nonfinite, bucket_cap_mb)
        module = _replayed(params_or_module, settings)
        shares = agree(comm, specs, settings, [*problems_of(named), *batch_norm_problems(module)])
        comm.broadcast_([*params, *buffers])
        storage = Storage(wire, settings.kind, watch=nonfinite == "raise", terms=shares.terms)
        reducer = BucketReducer(
            specs, params, cap_bytes=int(bucket_cap_mb * 2**20), comm=comm, storage=storage
        )
        norms = BatchNormReplay(module, most=shares.most, total=shares.total)
        super().__init__(Engine(reducer, comm, settings, norms, shares=shares))
        self._reducer = reducer

    @property
    def layout(self) -> Layout:
        """Where every gradient lies: buckets and slots."""
        return self._reducer.layout


def attach(
    ddp_model: DistributedDataParallel,
    *,
    accumulate: int,
    wire: Wire = FP32(),  # noqa: B008 - frozen
    accumulator: str | Exact = "fp32",
    nonfinite: str = "skip",
) -> Sync:
    """Let DDP's buckets travel once a window: registers the hook and drives DDP's no_sync.

    Args:
        ddp_model: the wrapped model, without another communication hook.
        accumulate, wire, accumulator, nonfinite: as for `GradSync`. Narrow parameters with "fp32" get fp32 sums beside
            DDP's buckets: 4 bytes an element more.

    Returns:
        The same loop as `GradSync` gives. Set `.grad` is DDP's own.

    Raises:
        TypeError: not a DistributedDataParallel.
        ValueError: a sparse embedding, which DDP puts into a bucket of its own; a SyncBatchNorm with "exact".
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model is a {type(ddp_model).__name__}: need a DistributedDataParallel; for a bare model use pe.GradSync"
        )
    state = HookState(wire=wire, group=ddp_model.process_group)
    named = list(ddp_model.module.named_parameters())
    specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named]
    settings = Settings(accumulate, wire, accumulator, nonfinite)
    comm = state.comm(named[0][1].device)
    module = _replayed(ddp_model.module, settings)
    problems = [*problems_of(named), *sparse_modules(ddp_model), *batch_norm_problems(module)]
    shares = agree(comm, specs, settings, problems)
    reducer = DDPReducer(ddp_model, state, accumulator=settings.kind, terms=shares.terms)
    norms = BatchNormReplay(module, most=shares.most, total=shares.total)
    return Sync(Engine(reducer, comm, settings, norms, shares=shares))


def _replayed(source: Any, settings: Settings) -> nn.Module:
    """Return the module whose running statistics the engine replays; an empty one if it does not."""
    is_exact = settings.kind == "exact"
    return source if is_exact and isinstance(source, nn.Module) else nn.Module()


def _named(source: Any) -> tuple[list[tuple[str, nn.Parameter]], list[Tensor]]:
    if isinstance(source, nn.Module):
        named, buffers = list(source.named_parameters()), list(source.buffers())
    else:
        items = list(source)
        named = [item if isinstance(item, tuple) else (f"param{i}", item) for i, item in enumerate(items)]
        buffers = []
    if not named:
        raise ValueError(
            "params_or_module: got no parameter; pass a module or its parameters (a generator only once)"
        )
    return named, buffers
