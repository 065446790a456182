"""The public loop: windows of micro-batches whose gradients travel once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.data.dealer import Dealer
from pyengine.engine.audited import Audited
from pyengine.engine.checkpoint.stateful import Stateful
from pyengine.engine.clipping import Clipping
from pyengine.engine.counted import Counted
from pyengine.engine.counting import CountOf, due_count, one_loss
from pyengine.engine.engine import Engine
from pyengine.engine.loop import Batch, Window, single_micro_batch, windows
from pyengine.engine.micro_batch import MicroBatch, backward, checked_backward, micro_batch
from pyengine.engine.position import Position
from pyengine.engine.torch_names import TorchNames
from pyengine.ops.device import flush
from pyengine.step.grad_scaler import GradScaler, taken_over
from pyengine.step.step_handle import StepHandle
from pyengine.step.step_record import StepCallback
from pyengine.step.window_optimizer import OptimizerCheck, WindowOptimizer, check_step
from pyengine.window.denominators import Loss
from pyengine.window.header import Count

if TYPE_CHECKING:
    from typing_extensions import Self


class Sync(Audited, Position, Clipping, Counted, Stateful, TorchNames):
    """Windows, counts and the step over gradients that somebody owns; made by `GradSync` and `attach`.

    Example:
        >>> for window in sync.windows(loader):                      # doctest: +SKIP
        ...     for x, y in window:
        ...         loss = cross_entropy(model(x), y, reduction="sum")
        ...         sync.backward(loss, count=y.numel())
        ...     sync.clip_grad_norm_(1.0)
        ...     sync.step(optimizer, scheduler)
    """

    def __init__(self, engine: Engine, *, ignored: Sequence[Parameter] = ()) -> None:
        self._open_engine: Engine | None = engine
        self._callbacks: OrderedDict[int, StepCallback] = OrderedDict()
        self._check = OptimizerCheck(engine.reducer.params, ignored)
        self._scaler: GradScaler | None = None
        self._running: MicroBatch | None = None

    def close(self) -> None:
        """Let the model go: hooks off, buffers freed, DDP's settings as they were; every later call here
        raises.

        `.grad` is kept where it is the caller's (after `unscale_`), as memory of its own, and None elsewhere.
        The model is then as it was before the engine was made, and another engine may be made over it. Talks
        to no other rank. Does nothing the second time. `with pe.GradSync(...) as sync:` closes at the end of
        the block, also after an exception.

        Warns:
            UserWarning: micro-batches of an open window are dropped.
        """
        engine, self._open_engine = self._open_engine, None
        if engine is not None:
            engine.close()
            self._check = OptimizerCheck([])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise RuntimeError("this engine has been closed: make a new one over the model")
        return self._open_engine

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, or None. Assign a `pe.GradScaler` to train in fp16, or a stock
        `torch.amp.GradScaler`, which becomes one; `backward` scales, `step` updates.
        """
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        ours = None if scaler is None else taken_over(scaler)
        enabled = ours if ours is not None and ours.is_enabled() else None
        if self._scaler is not None and self._scaler is not ours:
            self._scaler.unbind()
        if enabled is not None:
            enabled.bind(self._engine.final)
            flush(self._engine.device)
        self._scaler, self._engine.parts.scaler = ours, enabled

    def windows(
        self, loader: Iterable[Batch] | Dealer, *, count: CountOf | None = None
    ) -> Iterator[Iterator[Any]]:
        """Cut a loader into windows of `accumulate` micro-batches; the last one may be shorter.

        Ranks may have different numbers of micro-batches and of windows: one that has run out goes on with
        empty windows, in which it contributes zeros, until all have. The loader is read one micro-batch
        ahead. A `Dealer` has cut its windows already, and deals their micro-batches to whoever is free.

        Args:
            loader: of this rank's micro-batches.
            count: `count(batch)` says how many items a micro-batch's loss is summed over: a number or 0-dim
                tensor, or a dict of them by loss. The window is then read ahead as a whole and its counts
                are summed over all ranks before its first forward (`totals`); `backward` takes no `count`,
                and a dict of losses, each for its own mean: see the page on counts.

        Yields:
            One iterator of micro-batches a window. Every micro-batch handed out counts; its backward may run
            later (several forwards first), or never (it then contributes nothing).

        Raises:
            ValueError, TypeError: what `count` gave on some rank is no count, or ranks count different
                things; on every rank, before anything has run.
            RuntimeError: with `count`, some rank begins this window anew in the middle of it.
        """
        self._begin_loop("windows")
        return map(Window, windows(self._engine, loader, count))

    def accumulate(self, *, last: bool = False) -> AbstractContextManager[None]:
        """Wrap one micro-batch of a loop that cannot be nested: forward, backward, and a step that may be a
        no-op.

        Args:
            last: end the window with this micro-batch, however short it is (the end of the data).

        An exception in the body abandons the window on this rank and goes on.
        """
        self._begin_loop("accumulate")
        return single_micro_batch(self._engine, last=last)

    @contextmanager
    def micro_batch(self, *, count: Count | None = None) -> Iterator[MicroBatch]:
        """Make the body one micro-batch, whose backwards are yours: any number of them, with any arguments.

        The gradients that they leave are accumulated when the body ends; in the window's last micro-batch
        buckets leave then, or from inside the backward that `mb.last_backward()` marks. Losses are summed
        over items, as for `backward` (several means: `sync.weigh`); with `sync.scaler`, call
        `sync.scaler.scale(loss).backward()`. Forwards may be inside or before it.

        Args:
            count: as for `backward`; it may be set later, as `mb.count`. Of ranks that share a batch, those
                that do not speak for it (all but the last stage of a pipeline) may leave it out.

        Raises:
            RuntimeError: as `backward`.

        An exception in the body leaves half a micro-batch: unless the window is abandoned, it is refused on
        every rank when it is sent. Gradients written outside (a bare backward, a `zero_grad`) are refused in
        the same way.

        Example:
            >>> with sync.micro_batch(count=y.numel()) as mb:  # doctest: +SKIP
            ...     first.backward(retain_graph=True)
            ...     mb.loss = first.detach() + second.detach()
            ...     with mb.last_backward():
            ...         second.backward()
        """
        known = due_count(self._engine, count)
        with (
            self._micro_batch_of_backward(),
            micro_batch(self._engine, known, says=count is not None) as made,
        ):
            self._running = made
            try:
                yield made
            finally:
                self._running = None

    @property
    def running_micro_batch(self) -> MicroBatch | None:
        """The micro-batch whose `micro_batch` block is running; None outside of one."""
        return self._running

    def backward(
        self,
        loss: Loss,
        *,
        count: Count | None = None,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Run the backward of one micro-batch; the window's last one also reduces, overlapped.

        Args:
            loss: 0-dim, summed over the micro-batch's items; or their mean, without a `count`. Where
                `windows` counts several losses: a dict of them, with 0 for what a micro-batch has nothing of.
            count: items in `loss`: a number or a 0-dim tensor (never read on the host); None: what
                `windows` has read ahead, or 1. The window's gradient is divided by the sum of counts over all
                ranks and micro-batches. 0 adds nothing to that sum.
            gradient: of the loss, of its shape, which may then be any; the record does not tell the loss.
            retain_graph, create_graph, inputs: as `torch.Tensor.backward`. A second backward of the same
                micro-batch belongs into a `micro_batch` block.

        Raises:
            RuntimeError: outside a window, or after the window was sent.
            ValueError, TypeError: the loss or the count is none; nothing has run.
        """
        one = one_loss(self._engine, loss)
        run = checked_backward(
            one, gradient=gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )
        known = due_count(self._engine, count)
        with self._micro_batch_of_backward():
            backward(self._engine, one, known, run, is_told=gradient is None)

    def flush(self) -> None:
        """End the window here: reduce what has been accumulated, without another forward or backward.

        `.grad` then holds the mean over the window. Does nothing if it does already.

        Raises:
            RuntimeError: no window is open; or as `step`.
        """
        self._engine.flush()
        self._engine.finish()

    def unscale_(self) -> None:
        """Say that the window's gradients are used without `step`; `.grad` holds their mean already.

        Gradients that you do not zero are carried into the next window, as in a plain PyTorch loop.

        Raises:
            RuntimeError: the window has not been sent; or as `step`.
        """
        self._engine.unscale_()

    def step(
        self, optimizer: torch.optim.Optimizer, scheduler: Any = None, *, max_norm: float | None = None
    ) -> Tensor:
        """Step the optimizer with the window's gradients, unless they were not finite on some rank.

        What is in `.grad` is what the optimizer uses: the mean over the window, or what you have made of it.
        Several optimizers over one engine are stepped one after the other. A gradient that none of them has
        used, and that nobody has cleared, counts into the next window, as in a plain PyTorch loop; all others
        start from zero there.

        On an accelerator a fused optimizer decides on the device and the host does not wait: the scheduler's
        step, the StepRecord and errors follow when the next window is sent, when the loop over `windows` runs
        out, or at `synchronize()`, whichever comes first.

        Args:
            optimizer: over parameters of this engine.
            scheduler: stepped once, if the optimizer was.
            max_norm: clip the gradients of this engine first, as `clip_grad_norm_(max_norm)`.

        Returns:
            Whether the parameters changed, bool, 0-dim, on their device; the same on every rank. Looking at
            it waits.

        Raises:
            TypeError: what is given cannot be stepped.
            ValueError: a count is off on some rank, or the optimizer holds a gradient not reduced here.
            RuntimeError: the window has not been sent, or ranks differ.
            FloatingPointError: inf or nan under nonfinite="raise".

        Cost: the optimizer's own pass, and with `max_norm` that of `clip_grad_norm_`.
        """
        check_step(optimizer, scheduler)
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        return self._engine.step(optimizer, scheduler, self._check, self._callbacks.values())

    def synchronize(self) -> None:
        """Wait for the outcome of the last step, and compare what the ranks have done in it.

        Its scheduler steps, its StepRecord is emitted, its errors are raised. Between windows ranks also tell
        each other how they have used the last one, as the next window's header would; the end of a loop over
        `windows` does the same. Call it after a loop that does not use `windows` or was left by `break`, and
        on accelerators before the scheduler's state is read. Every rank calls it at the same point.

        Raises:
            RuntimeError: ranks have stepped, clipped or scaled differently; on every rank.
        """
        self._engine.reach_verdicts()
        if self._engine.is_between_windows:
            self._engine.compare()

    def wrap(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> WindowOptimizer:
        """Return an optimizer whose `step` and `zero_grad` do nothing except where a window ends.

        A scheduler given here is stepped with it, where a step was not skipped; one that is made over what
        this returns is yours to step, where `is_sync_step`.
        """
        return WindowOptimizer(self, optimizer, scheduler)

    def refuse_bare_gradients(self) -> None:
        """Raise RuntimeError if a bare `loss.backward()` outside of every window has left gradients; does
        nothing while a window is open, whose end finds them.

        Cost: a look at every `.grad`, 0.4 µs each; where one was written the host waits for it.
        """
        self._engine.refuse_bare_gradients()

    def abandon(self) -> None:
        """Drop the current window on this rank, after an exception, say; the next one starts clean."""
        self._engine.abandon()

    def on_step(self, callback: StepCallback) -> StepHandle:
        """Call `callback(record)` after every optimizer step; usable as a decorator.

        Returns:
            A handle like those of PyTorch's hooks: `handle.remove()` takes the callback off. Callable as the
            callback.
        """
        if not callable(callback):
            raise TypeError(f"callback is a {type(callback).__name__}: need a function of a StepRecord")
        return StepHandle(self._callbacks, callback)
