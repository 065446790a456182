"""The public interface for the training loop: windows of micro-batches, reduced once per window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.audit.handle import check_device, check_every
from pyengine.engine.backward import checked_backward
from pyengine.engine.between_windows import (
    check_ranks_agree,
    check_same_call,
    measure,
    metric_context,
    resize,
)
from pyengine.engine.captured_windows import MIN_WARM_UP, CapturedWindows, capture_problems
from pyengine.engine.engine import Engine
from pyengine.engine.loop import Batch, CountOf, Windows, single_micro_batch
from pyengine.engine.micro_batch import MicroBatch
from pyengine.engine.misnamed import answer_to_setting, check_function
from pyengine.engine.resume import load_state, take_snapshot
from pyengine.engine.retry import Items, Retries
from pyengine.engine.window_audit import WindowAudit
from pyengine.gradients.layout import Layout
from pyengine.gradients.own import BucketReducer
from pyengine.gradients.xla import XlaReducer
from pyengine.ops.device import HOST, flush, send
from pyengine.step.grad_scaler import GradScaler, taken_over
from pyengine.step.step_record import StepCallback, StepHandle, StepRecord
from pyengine.step.window_optimizer import OptimizerCheck, WindowOptimizer, check_step
from pyengine.window.counter import State, check_accumulate
from pyengine.window.denominators import Loss
from pyengine.window.header import Count
from pyengine.window.metric import Metric, trained

if TYPE_CHECKING:
    from typing_extensions import Self

ClipPer = Literal["parameter"] | Mapping[str, Iterable[str | Parameter]] | None


class Sync:
    """The windows, counts and optimizer steps of one engine; created by `GradSync` and `attach`.

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
        self._check = OptimizerCheck(engine.reducer.params, ignored)
        self._scaler: GradScaler | None = None
        # Parameter indices on the device, by the groups of `clip_grad_norm_(per=...)`.
        self._clip_groups: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
        self._running: MicroBatch | None = None
        self._retries: Retries | None = None  # Set by the first call to `retry_smaller`.
        # The flag that `no_sync` sets; None if `windows` or `accumulate` determines the last micro-batch.
        self._requires_sync: bool | None = None

    def close(self) -> None:
        """Release the model: remove hooks, free buffers, and restore DDP's settings.

        Later calls on this engine raise an error. Gradients that belong to the caller (after `unscale_`) stay
        in `.grad`, in separate memory; every other `.grad` becomes None. The model is then as it was before
        the engine was created, and a new engine may own it. No collective is launched, and a second call does
        nothing. `with pe.GradSync(...) as sync:` closes the engine at the end of the block, even after an
        exception.

        Warns:
            UserWarning: micro-batches of an open window are dropped.
        """
        engine, self._open_engine = self._open_engine, None
        if engine is not None:
            engine.close()
            self._check, self._retries = OptimizerCheck([]), None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise AttributeError for a method's name or a setting that does not exist."""
        if answer := answer_to_setting(type(self), name, value):
            raise AttributeError(answer)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        name, engine = type(self).__name__, self._open_engine
        if engine is None:
            return f"{name}(closed)"
        wire, counter = engine.reducer.residuals.wire, engine.counter
        return (
            f"{name}({len(engine.reducer.params)} parameters, accumulate={counter.accumulate}, "
            f"world_size={engine.comm.world_size}, wire={wire}, accumulator={engine.identity.accumulator!r}, "
            f"window={counter.index})"
        )

    def __call__(self, *_: object, **__: object) -> Any:
        """Raise TypeError, because an engine has no forward."""
        raise TypeError("call the model itself, and give its loss to sync.backward: an engine has no forward")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise RuntimeError("this engine has been closed: make a new engine for the model")
        return self._open_engine

    @property
    def layout(self) -> Layout:
        """The layout of the gradients: the position of every gradient, by bucket and slot.

        Raises:
            AttributeError: FSDP2 or `replicate` determines the layout of this model's gradients.
        """
        reducer = self._engine.reducer
        if isinstance(reducer, BucketReducer | XlaReducer):
            return reducer.layout
        raise AttributeError("sync.layout requires GradSync, or attach over DDP; here torch owns the layout")

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler for training in fp16, or None.

        To train in fp16, assign a `pe.GradScaler` between windows. A `torch.amp.GradScaler` is converted to a
        `pe.GradScaler`. `backward` scales the loss and `step` updates the scale.
        """
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        engine = self._engine
        if scaler is not self._scaler and engine.counter.is_accumulating:
            raise RuntimeError(
                f"sync.scaler was set in the middle of window {engine.counter.index}, whose losses have been "
                "scaled by the old scaler: set it after sync.step, or discard the window with "
                "sync.abandon() first"
            )
        ours = None if scaler is None else taken_over(scaler)
        enabled = ours if ours is not None and ours.is_enabled() else None
        if self._scaler is not None and self._scaler is not ours:
            self._scaler.unbind()
        if enabled is not None:
            enabled.bind(engine.final, engine.counter)
            flush(engine.device)
        self._scaler, engine.scaler = ours, enabled
        engine.follow_scale()

    # ---- loops ----

    def windows(self, loader: Iterable[Batch], *, count: CountOf | None = None) -> Windows[Batch]:
        """Split a loader into windows of `accumulate` micro-batches; the last window may be shorter.

        Ranks may have different numbers of micro-batches and windows: a rank without data gets empty windows,
        in which it contributes zeros, until no rank has data left. The loader is read one micro-batch ahead.

        Args:
            loader: an iterable of this rank's micro-batches.
            count: `count(batch)` returns the number of items in the loss of a micro-batch: a number, a 0-dim
                tensor, or a dict with a number or tensor per loss. The whole window is then read ahead, and
                its counts are summed over all ranks before its first forward (`totals`). With `count`, do not
                pass a count to `backward`. `backward` then also accepts a dict of losses, each of which
                becomes a separate mean (see the page on counts).

        Returns:
            An iterator of windows, each an iterator of micro-batches. Every micro-batch that the iterator
            yields is counted. The backward of a micro-batch may run after further forwards; a micro-batch
            without a backward contributes nothing. If every rank's loader has a length, `len` returns the
            largest number of windows on any rank; every rank must call it.

        Raises:
            ValueError, TypeError: `count` returned an invalid count on some rank, or ranks count different
                losses. Raised on every rank, before any forward.
            RuntimeError: `count` is given, and some rank has dropped this window and opened it again.
        """
        self._begin_loop("windows")
        return Windows(self._engine, loader, count)

    def accumulate(self, *, last: bool = False) -> AbstractContextManager[None]:
        """Wrap one micro-batch of a flat loop: forward, backward, and a step that may be a no-op.

        Args:
            last: whether to end the window with this micro-batch, for example at the end of the data.

        If the body raises an exception, this rank drops the window, and the exception propagates.
        """
        self._begin_loop("accumulate")
        return single_micro_batch(self._engine, last=last)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the body without ending the window.

        As with DDP's `no_sync`, the first `sync.backward` after the body ends the window and reduces the
        gradients. The body may run any number of micro-batches. `accumulate` is the length of the longest
        window; a shorter window is divided by its own count. Every rank must run the same number of windows.
        Windows may differ in length between ranks, except over a sharded model, because its forwards are
        collective and only `windows` adds padding. If the first window may have a single micro-batch, call
        `set_requires_gradient_sync(True)` before the `backward` of that micro-batch.

        Raises:
            RuntimeError: called inside a micro-batch of `windows` or `accumulate`, which determine the
                window's last micro-batch themselves. In the body, `backward` also raises this error for the
                last of `accumulate` micro-batches.

        Example:
            >>> for i, (x, y) in enumerate(loader, start=1):  # doctest: +SKIP
            ...     last = i % 8 == 0 or i == len(loader)
            ...     with nullcontext() if last else sync.no_sync():
            ...         sync.backward(loss_sum(model(x), y), count=len(y))
            ...     if last:
            ...         sync.step(optimizer)
        """
        before = self._requires_sync
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._requires_sync = before is None or before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether each following `backward` ends its window, like the FSDP method of the same name.

        The setting holds until the next call; see `no_sync`.

        Args:
            requires_gradient_sync: False before every micro-batch of a window except the last, True before
                the last.

        Raises:
            TypeError: the argument is not a bool.
            RuntimeError: for the same reasons as in `no_sync`.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise TypeError(
                f"requires_gradient_sync={requires_gradient_sync!r} is a "
                f"{type(requires_gradient_sync).__name__}: expected True for a window's last micro-batch, "
                "otherwise False"
            )
        engine = self._engine
        if engine.counter.has_micro_batch_out:
            raise RuntimeError(
                "no_sync or set_requires_gradient_sync inside a micro-batch of sync.windows or "
                "sync.accumulate, which already know the window's last micro-batch: leave this call out"
            )
        self._requires_sync = requires_gradient_sync

    # ---- one micro-batch ----

    @contextmanager
    def micro_batch(self, *, count: Count | None = None) -> Iterator[MicroBatch]:
        """Run the body as one micro-batch, with any number of backwards, each with any arguments.

        The gradients of these backwards are accumulated when the body ends. In the window's last micro-batch
        the buckets are reduced when the body ends, or during the backward that `mb.last_backward()` marks.
        Losses are sums over items, as for `backward` (for several means see `sync.weigh`). With
        `sync.scaler`, call `sync.scaler.scale(loss).backward()`. Forwards may run inside or before the body.

        Args:
            count: see `backward`; may be set later, as `mb.count`. If ranks share a batch, only the reporting
                rank (the last stage of a pipeline) needs a count.

        Raises:
            RuntimeError: for the same reasons as in `backward`.

        After an exception in the body the micro-batch is incomplete: unless the window is abandoned, every
        rank raises an error when the window is reduced. The same happens if a bare backward or `zero_grad`
        outside the body writes to gradients.

        Example:
            >>> with sync.micro_batch(count=y.numel()) as mb:  # doctest: +SKIP
            ...     first.backward(retain_graph=True)
            ...     mb.loss = first.detach() + second.detach()
            ...     with mb.last_backward():
            ...         second.backward()
        """
        engine = self._engine
        known = engine.due_count(count, engine.known_denominators())
        run = engine.micro_batch(known, is_stated=count is not None, may_replace=True)
        with self._micro_batch_of_backward(engine), run as micro_batch:
            self._running = micro_batch
            try:
                yield micro_batch
            finally:
                self._running = None

    @property
    def running_micro_batch(self) -> MicroBatch | None:
        """The micro-batch whose `micro_batch` block is running; None outside a block."""
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
        """Run the backward of one micro-batch; the window's last backward overlaps with the reductions.

        Args:
            loss: a 0-dim tensor: the loss summed over the items of the micro-batch, or, without a `count`,
                the mean over them. If `windows` counts several losses, a dict of losses, with 0 for a loss
                without items in this micro-batch.
            count: number of items in `loss`: a number or a 0-dim tensor (which the host never reads). The
                default is the count that `windows` has read ahead, or 1. The window's gradient is divided by
                the sum of counts over all ranks and micro-batches. A count of 0 adds nothing to the sum.
            gradient: gradient with respect to `loss`, of the same shape. `loss` may then have any shape; the
                record does not include this loss.
            retain_graph, create_graph, inputs: as in `torch.Tensor.backward`. Use a `micro_batch` block to
                run a second backward of the same micro-batch.

        Raises:
            RuntimeError: called outside a window, or after the window's reduction was launched.
            ValueError, TypeError: the loss or the count is invalid. No backward has run.
        """
        engine = self._engine
        totals = engine.known_denominators()
        one: Any = loss
        if totals is not None:
            one = totals.weigh(loss, engine.device)
        elif not isinstance(loss, Tensor) and isinstance(loss, Mapping):
            raise TypeError(f"loss: got a dict of {list(loss)}, but {_UNCOUNTED}")
        run = checked_backward(
            one, gradient=gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )
        scaler, checks = engine.scaler, engine.loss_checks
        if checks.is_first_window or scaler is not None:
            checks.refuse_scaled(one, scaler)
        known = engine.due_count(count, totals)
        with self._micro_batch_of_backward(engine):
            if checks.is_first_window:
                checks.warn_of_division(one, count)
                counted = [(one, count)] if totals is None else totals.counted(loss, engine.counter.done)
                for each, its_count in counted:
                    checks.warn_of_reduction(each, its_count)
            record = one if gradient is None else None
            with engine.micro_batch(
                known, is_stated=count is not None, may_replace=create_graph, loss=record
            ) as micro_batch:
                scaled = one if scaler is None else scaler.scale(one)
                micro_batch.has_only = True
                with engine.last_backward(micro_batch, (scaled,)):
                    run(scaled)

    def retry_smaller(self, batch: Any, fn: Callable[[Any], tuple[Tensor, Count] | Loss]) -> None:
        """Run the forward and backward of one micro-batch, with retries in smaller parts if memory runs out.

        A part that does not fit in memory is halved until it fits, on this rank alone, without a collective.
        All parts form one micro-batch, with the sum of their losses and counts. The window's gradient equals
        the gradient of the whole micro-batch up to rounding; runs with the same parts (`part_size`) give the
        same bits. A failed attempt changes neither the parameters' gradients, nor the buffers of the engine's
        module, nor the generators of `pe.micro_batch_rng`. Dropout draws random numbers per part and
        BatchNorm normalizes over a part, so the results of these layers depend on the parts. Under `attach`,
        DDP broadcasts buffers after the window's last forward, not during that forward.

        Args:
            batch: tensors with the items in dimension 0, in nested dicts, lists and tuples. 0-dim tensors,
                numbers and strings are passed to every part. A list without tensors is split if its length is
                the number of items.
            fn: `fn(part)` runs the forward and returns `(loss, count)`: the loss summed over the items of the
                part, and the number of items. If `windows` reads counts ahead, `fn` returns only the loss or
                the dict of losses. `fn` runs again after a failure, so it must not launch collectives or have
                lasting side effects.

        Raises:
            torch.OutOfMemoryError: a single item does not fit; every rank then raises an error when the
                window is reduced, as after any exception in a micro-batch.
            ValueError, TypeError: the batch cannot be split; `fn` returned a value of the wrong form; the
                model's forwards are collective (FSDP2, tensor and pipeline parallelism, SyncBatchNorm); or
                the device is an XLA device.

        Warns:
            UserWarning: memory has run out; the warning gives the new size of parts.

        Cost: without a failure, copies of the module's buffers and of the generators' states. If `.grad`
        holds the sums, also memory for a second gradient of the model, and a pass that adds this gradient to
        the sums. Communication starts after the window's last micro-batch has ended. If that micro-batch is
        known to fit, call `backward` for it to get overlap. The work of a failed attempt is lost.

        Example:
            >>> def train_micro_batch(part):  # doctest: +SKIP
            ...     x, y = part
            ...     return cross_entropy(model(x), y, reduction="sum"), len(y)
            >>> for window in sync.windows(loader):  # doctest: +SKIP
            ...     for batch in window:
            ...         sync.retry_smaller(batch, train_micro_batch)
            ...     sync.step(optimizer)
        """
        check_function("fn", fn, "of a part that returns (loss, count)")
        items = Items(batch)
        if self._retries is None:
            self._retries = Retries(self._engine)
        with self.micro_batch() as micro_batch:
            self._retries.run(micro_batch, items, fn)

    @property
    def part_size(self) -> int | None:
        """Maximum number of items in a forward of `retry_smaller`; None means the whole micro-batch.

        The size decreases when this rank runs out of memory, and never increases by itself. Set `part_size`
        to start with a size that fits, or to get the same parts (and bits) in another run. Set it to None to
        try whole micro-batches again. `part_size` is not part of `state_dict`.
        """
        return self._engine.part_size

    @part_size.setter
    def part_size(self, size: int | None) -> None:
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"part_size={size!r}: expected a whole number of items or None (all)")
        self._engine.part_size = size

    @property
    def totals(self) -> dict[str, float]:
        """The counts of the window for each loss, summed over all ranks and micro-batches.

        The totals are available before the window's first forward. If the count function returns plain
        numbers, the only key is "count". The dict is empty if no counts were read ahead.
        """
        known = self._engine.window.denominators
        return {} if known is None else dict(known.totals)

    def weigh(self, losses: Mapping[str, Tensor | float]) -> Tensor:
        """Combine several losses into one, as `backward` does.

        The result is the sum of the losses, each multiplied by divisor / total. The total is the loss's entry
        in `totals`, and the divisor is the count by which the engine later divides the window's gradient.

        Args:
            losses: see `backward`.

        Returns:
            A 0-dim tensor for a backward inside a `micro_batch` block. Do not combine it with a `backward` on
            a dict of losses.

        Raises:
            RuntimeError: the counts of the window were not read ahead.
            ValueError: the names of the losses and of the counts differ.
        """
        totals = self._engine.known_denominators()
        if totals is None:
            raise RuntimeError(f"weigh: {_UNCOUNTED}")
        return totals.weigh(losses, self._engine.device)

    def _begin_loop(self, name: str) -> None:
        """Let `windows` or `accumulate` determine which micro-batch is the last."""
        if self._requires_sync is False:
            raise RuntimeError(
                f"{name} while gradient sync is off: {name} determines the window's last micro-batch itself; "
                "leave no_sync out, or call set_requires_gradient_sync(True) first"
            )
        self._requires_sync = None

    def _micro_batch_of_backward(self, engine: Engine) -> AbstractContextManager[None]:
        """Return a context for a backward; outside of a loop's micro-batch it opens a new micro-batch."""
        counter = engine.counter
        if counter.has_micro_batch_out:
            return nullcontext()
        if self._requires_sync is None and counter.accumulate == 1 and counter.state is State.IDLE:
            self._requires_sync = True  # the window has one micro-batch, which must be the last
        if self._requires_sync is None:
            return nullcontext()
        due = counter.due if counter.state is State.OPEN else counter.share
        if not self._requires_sync and len(due) == 1:
            raise RuntimeError(
                f"backward without sync in the last micro-batch of window {counter.index} "
                f"(accumulate={counter.accumulate}): sync in this micro-batch, or make the engine with the "
                "number of micro-batches of your longest window"
            )
        return single_micro_batch(engine, last=self._requires_sync)

    # ---- end of a window ----

    def flush(self) -> None:
        """End the window now: reduce the accumulated gradients without another forward or backward.

        `.grad` then holds the mean over the window. `flush` does nothing if the window was already reduced.

        Raises:
            RuntimeError: no window is open; also for the same reasons as in `step`.
        """
        self._engine.flush()

    def unscale_(self) -> None:
        """Use the window's gradients without `step`; `.grad` already contains their unscaled mean.

        Gradients that you do not zero are carried into the next window, as in a plain PyTorch loop. If `step`
        would be skipped, because of inf or nan or because a rank has dropped the window, the gradients
        contain inf or nan: check `grad_norm()` before you step the optimizer yourself. The loss scale of
        `scaler` is updated, as in `step`. Every rank must call `unscale_`; ranks compare these calls in the
        next window's header.

        Raises:
            RuntimeError: the reductions have not been launched; also for the same reasons as in `step`.
        """
        self._engine.release_grads()

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the current gradients, after any clipping.

        If ranks hold different elements (shards or experts, but not `replicate`), this is the norm at the
        time of the last reduction or clipping.

        Returns:
            A 0-dim float64 tensor on the gradients' device.

        Cost: a check of every `.grad`. If any of them was written to after the reduction, all gradients are
        read.
        """
        engine = self._engine
        engine.wait()
        engine.renew_norm_alone()  # a single rank may call this, so no collective may run
        return engine.final.guarding_norm(engine.final.grad_norm())

    def grad_norms(self) -> dict[str, Tensor]:
        """Return the 2-norm of each parameter's current gradient, after any clipping, by name.

        Each norm is a 0-dim float64 tensor on the gradients' device, with the same bits on every rank. A
        parameter without a gradient has norm 0; frozen parameters are left out. If ranks hold different
        elements (shards, experts, stages), each norm covers the elements of that parameter on all ranks, and
        every rank must call `grad_norms` at the same point. To record these norms in every step, use
        `sync.measure(pe.GradNorms())`.

        Cost: see `grad_norm`. If ranks hold different elements, also one all-reduce of 8 bytes per parameter,
        which in later windows replaces the all-reduce of the norm.
        """
        engine = self._engine
        engine.wait()
        measured = metric_context(engine)
        engine.renew_norm("reads norms by name")
        return trained(measured, engine.final.squares().sqrt().unbind())

    def measure(self, *measures: Metric) -> None:
        """Add metrics to the `StepRecord` of every window, starting with the next window.

        Every rank calls this with the same arguments, between windows. With metrics, windows of `capture` run
        without a graph.

        Args:
            measures: `pe.GradNorms()`, `pe.NoiseScale()` or `pe.SpikePolicy(...)`; at most one of each kind.
                A metric object may be used with one engine only.

        Raises:
            ValueError: an argument is not a metric, is not available for these gradients, or belongs to
                another engine; ranks differ; or a window is open. Raised on every rank, without any change.
            RuntimeError: some rank is at another point of its loop. Raised on every rank.

        Cost: see each metric. This call adds one small all-reduce and one gather of objects.
        """
        measure(self._engine, measures)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        per: ClipPer = None,
    ) -> Tensor:
        """Clip the gradients to a maximum norm, as `torch.nn.utils.clip_grad_norm_` does.

        The gradients of all parameters of this engine are multiplied by min(1, max_norm / norm).

        Args:
            max_norm: the largest allowed norm of the mean gradient.
            norm_type: 2.0, or inf for the largest absolute value.
            error_if_nonfinite: whether to raise an error if the norm is inf or nan. By default the step is
                skipped.
            per: "parameter" clips each parameter's gradient by its own norm. A dict from group to names or
                parameters clips each group by the group's norm, to the same `max_norm`, and does not clip
                other parameters. Every rank must pass the same groups.

        Returns:
            The norm before clipping, over all parameters and ranks: a 0-dim float64 tensor with the same bits
            on every rank.

        Raises:
            TypeError: a limit or `norm_type` is not a number.
            ValueError: `max_norm` is negative or nan; `norm_type` is neither 2.0 nor inf; groups overlap, or
                name a parameter that does not belong to this engine.
            RuntimeError: `error_if_nonfinite` is set and the norm is not finite; raised on every rank. The
                gradients are then not clipped: `sync.step` skips the step, and `sync.abandon()` drops the
                window.

        Cost: the 2-norm was computed during the finite check; the inf-norm reads the gradients once. Clipping
            takes one pass that reads and writes every gradient; this pass is left out if the host sees that
            the norm is within `max_norm`. With `per`, clipping takes one kernel launch per parameter on an
            accelerator; on a CPU it reads and writes only the gradients that it clips. If ranks hold
            different elements, clipping needs one small all-reduce on every rank; on a CPU a header
            all-reduce precedes it. Both are left out if the host knows that a rank has dropped the window,
            because that rank does not clip. `error_if_nonfinite` waits for the device.
        """
        limit: Any = max_norm
        is_tensor = isinstance(limit, Tensor) and limit.numel() == 1
        if not is_tensor or limit.device == HOST:  # the check must not wait for a device
            _check_limit("max_norm", limit.item() if is_tensor else limit, "; inf only measures")
        order = _checked_order(norm_type)
        engine = self._engine
        if per is not None and order != 2.0:
            raise ValueError(f"norm_type={norm_type!r} with per={per!r}: use 2.0, or leave per out")
        verdict, final = engine.wait(), engine.final
        groups = None if per is None else self._groups_of(per)
        engine.renew_norm(f"clips to a {order:g}-norm{'' if per is None else ' of each parameter or group'}")
        is_largest = order == math.inf and not engine.is_void
        norm = final.inf_norm(engine.published.largest()) if is_largest else final.grad_norm()
        if error_if_nonfinite:
            engine.reach_verdicts()
            # As in torch. The norm is equal on all ranks.
            if not math.isfinite(number := float(norm)):
                why = verdict.reason or "it exceeds the range of its dtype"
                raise RuntimeError(
                    f"the gradients' norm of order {order:g} is {number}, and error_if_nonfinite is set "
                    f"({why}): nothing was clipped; call sync.step, which skips this step on every rank, or "
                    "sync.abandon()"
                )
        if per is None:
            engine.clip(max_norm, norm)
        else:
            engine.published.scale_each_(final.clip_each(max_norm, groups).float())
            engine.foreign.marks.record_published()
        return final.guarding_norm(norm)

    def _groups_of(self, per: ClipPer) -> Sequence[Tensor] | None:
        """Return each group's parameter indices, or None if every parameter is a separate group."""
        engine, names = self._engine, metric_context(self._engine).names
        if per == "parameter":
            return None
        name_of = dict(zip(map(id, engine.reducer.params), engine.reducer.names, strict=True))
        groups = tuple(_checked_groups(per, {name: index for index, name in enumerate(names)}, name_of))
        if groups not in self._clip_groups:  # a captured window must not copy from the host
            self._clip_groups[groups] = [send(group, torch.int64, engine.device) for group in groups]
        return self._clip_groups[groups]

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip every element of the mean gradient to [-clip_value, clip_value].

        Like `torch.nn.utils.clip_grad_value_`. A step with inf or nan is skipped whether or not values are
        clipped.

        Args:
            clip_value: the largest allowed absolute value, the same on every rank.
            foreach: accepted for compatibility with torch; ignored.

        Raises:
            TypeError: `clip_value` is not a number (the engine knows its parameters: do not pass them).
            ValueError: `clip_value` is negative or nan.

        Cost: one pass that reads and writes every gradient, and one pass that reads every gradient for the
            norm (of `grad_norm` and a later `clip_grad_norm_`).
        """
        del foreach
        _check_limit("clip_value", clip_value)
        value, engine = float(clip_value), self._engine
        verdict, final = engine.wait(), engine.final
        engine.renew_norm("clips values")
        final.keep_norm()
        engine.published.clip_values_(value)
        engine.renew_norm("has clipped values", has_changed=True)
        engine.foreign.marks.record_published()
        # Ranks compare this value in the next header.
        verdict.use.factors.append(torch.tensor(value, dtype=torch.float64, device=HOST))

    def step(
        self, optimizer: torch.optim.Optimizer, scheduler: Any = None, *, max_norm: float | None = None
    ) -> Tensor:
        """Step the optimizer with the window's gradients unless some rank has inf or nan.

        The optimizer uses the current `.grad`: the mean over the window, including your changes. If an engine
        has several optimizers, step them one after another. A gradient that no optimizer has used and that
        was not cleared is carried into the next window, as in a plain PyTorch loop; all other gradients start
        the next window from zero.

        On an accelerator with a fused optimizer the device decides whether to skip the step, and the host
        does not wait for it. The scheduler's step, the StepRecord and errors then come later: when the next
        window is sent, when the loop over `windows` ends, or in `synchronize()`, whichever comes first.

        Args:
            optimizer: an optimizer over parameters of this engine.
            scheduler: a scheduler, which is stepped once unless the optimizer's step was skipped.
            max_norm: clip the gradients of this engine first, as `clip_grad_norm_(max_norm)` does.

        Returns:
            Whether the parameters changed: a 0-dim bool tensor on the parameters' device, the same on every
            rank. Reading its value waits for the device.

        Raises:
            TypeError: the optimizer or scheduler cannot be stepped.
            ValueError: a count is invalid on some rank, or the optimizer has a gradient that this engine does
                not reduce.
            RuntimeError: the reductions have not been launched, or ranks disagree.
            FloatingPointError: with nonfinite="raise", a gradient has inf or nan.

        Cost: the optimizer's own step, and with `max_norm` the cost of `clip_grad_norm_`.
        """
        check_step(optimizer, scheduler)
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        return self._engine.step(optimizer, scheduler, self._check)

    def synchronize(self) -> None:
        """Wait for the outcome of the last step, and check that all ranks have made the same calls.

        This call steps the scheduler of that step, emits its StepRecord, and raises its errors. Between
        windows ranks also compare how they used the gradients of the last window (steps, clipping). The same
        check runs at the end of a loop over `windows`. Call `synchronize` after a loop that does not use
        `windows` or that `break` has ended, and on accelerators before reading the scheduler's state. Every
        rank must call it at the same point.

        Raises:
            RuntimeError: ranks have stepped, clipped or scaled differently. Raised on every rank.
        """
        self._engine.reach_verdicts()
        if self._engine.is_closed:
            check_ranks_agree(self._engine)

    def wrap(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> WindowOptimizer:
        """Return an optimizer whose `step` and `zero_grad` do nothing except at the end of a window.

        A scheduler passed here is stepped together with the optimizer, unless the step was skipped. If you
        create a scheduler from the returned optimizer, step it yourself when `is_sync_step` is True.
        """
        return WindowOptimizer(self, optimizer, scheduler)

    def refuse_bare_gradients(self) -> None:
        """Raise RuntimeError if a bare `loss.backward()` between windows has left gradients.

        Does nothing in an open window, because such gradients are detected when the window ends.

        Cost: a check of every `.grad`, 0.4 µs each. If a gradient was written to, the host waits for its
        value.
        """
        engine = self._engine
        if engine.is_closed and not engine.kept_grads.is_handed_over:
            engine.refuse_written_past()

    def abandon(self) -> None:
        """Drop the current window on this rank, for example after an exception.

        The next window starts with zero sums.
        """
        self._engine.abandon()

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the last optimizer step; None before the first step.

        On an accelerator, this is the last step whose outcome the host has read; `synchronize` reads all
        outcomes.

        Cost: on an accelerator the host waits for the device's timing events.
        """
        make = self._engine.records.make_last
        return None if make is None else make()

    def on_step(self, callback: StepCallback) -> StepHandle:
        """Call `callback(record)` after every optimizer step; also usable as a decorator.

        Returns:
            A handle like PyTorch's hook handles: `handle.remove()` removes the callback. Calling the handle
            calls the callback.
        """
        check_function("callback", callback, "of a StepRecord")
        return StepHandle(self._engine.records.callbacks, callback)

    # ---- windows as CUDA graphs ----

    def capture(self, train_window: Callable[[list[Any]], object], *, warm_up: int = 3) -> CapturedWindows:
        """Return a function that trains windows, most of them by replaying one CUDA graph.

        The first `warm_up` windows of a form (number of micro-batches, structure, shapes, dtypes) run without
        a graph. Then one window is captured, and later windows replay the graph. The graph contains forwards,
        backwards, reductions, norm, clipping and optimizer steps, and costs the host a single launch.
        Results and records (except the seconds per phase) are bitwise the same as without a graph; skipped
        steps and checks between ranks are the same, too. Windows of other lengths, and windows on ranks
        without data, run without a graph.

        DDP accumulates gradients on the stream that was current when DDP was created: create DDP and the
        engine, and run the loop, inside `with torch.cuda.stream(torch.cuda.Stream())`.

        Args:
            train_window: `train_window(batches)` runs the backwards of a window's micro-batches, clips, and
                calls `sync.step(optimizer)`. The tensors in `batches` are on the device. Python runs this
                function only before and during the capture, so it must not depend on host state, read
                from the device (`loss.item()`), or copy tensors from the host. Enter autocast inside this
                function.
            warm_up: number of windows of each form before the capture; at least 3. The last two of these
                windows are recorded and compared. Over DDP the first capture comes after 11 windows, as
                torch requires.

        Returns:
            A function to call with each window of `sync.windows`; see its attributes `num_captured`,
            `num_replayed` and `problems`.

        Raises:
            TypeError: `train_window` is not callable; `warm_up` is not a whole number of at least 3.
            ValueError: the windows of this engine cannot be captured; the error message gives the reasons.

        Warns:
            UserWarning: windows of some form run without a graph. The warning names the operation that
                needs the host, and its source line. A fused optimizer needs `capturable=True` if it has that
                option, and a learning rate that changes has to be a tensor.

        Cost: the graph keeps the memory of one window's activations. Two windows before the capture run under
        a `TorchDispatchMode`. On the host, a replayed window costs the copies of its inputs, the launch, and
        0.5 µs per parameter.

        Example:
            >>> def train_window(batches):  # doctest: +SKIP
            ...     for x, y in batches:
            ...         sync.backward(loss_sum(model(x), y), count=y.numel())
            ...     sync.step(optimizer, scheduler, max_norm=1.0)
            >>> step = sync.capture(train_window)  # doctest: +SKIP
            >>> for window in sync.windows(loader):  # doctest: +SKIP
            ...     record = step(window)
        """
        check_function("train_window", train_window, "of a window's batches")
        if type(warm_up) is not int or warm_up < MIN_WARM_UP:
            raise TypeError(
                f"warm_up={warm_up!r}: expected a whole number of windows, at least {MIN_WARM_UP}"
            )
        if problems := list(capture_problems(self._engine)):
            raise ValueError(f"capture: {'; '.join(problems)}")
        return CapturedWindows(lambda: self._engine, train_window, warm_up=warm_up)

    # ---- position of the loop ----

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches in a full window on this rank; initially `accumulate`.

        Set it between two windows, to the same number on every rank; a loop over `windows` continues with
        windows of this length. Raises ValueError if the number is not an integer of at least 1, or with
        accumulator="exact", whose bits depend on this number. Raises RuntimeError inside a window.
        """
        return self._engine.counter.accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        wrong = check_accumulate(steps)
        if wrong:
            raise ValueError("gradient_accumulation_steps" + wrong[0].removeprefix("accumulate"))
        resize(self._engine, steps)

    @property
    def is_sync_step(self) -> bool:
        """Whether the current micro-batch is the window's last.

        Also True when no micro-batches are left, and after `flush`.
        """
        return self._engine.counter.ends

    @property
    def is_padding(self) -> bool:
        """Whether the current micro-batch is padding: a repeated batch that does not contribute.

        Over a sharded model a rank without data runs padding, because forwards are collective.
        """
        return self._engine.window.is_padding

    @property
    def reduced_window(self) -> object | None:
        """An object that identifies this window after its reduction; None before the reduction."""
        return self._engine.window.verdict

    @property
    def window(self) -> int:
        """Index of the window, from 0; it increases when the next window begins."""
        return self._engine.counter.index

    @property
    def place(self) -> int:
        """Index of the current micro-batch within the window, over all ranks.

        See `pe.micro_batch_rng`.
        """
        counter = self._engine.counter
        if not (counter.places or self.is_padding):
            raise RuntimeError("place: no micro-batch has been handed out in this window")
        return counter.latest

    @property
    def due(self) -> list[int]:
        """Indices of the micro-batches that this rank has not started in the window; see `place`."""
        counter = self._engine.counter
        return list(counter.due if counter.state is State.OPEN else counter.share)

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's engine between two windows, as tensors and plain values.

        The state has the form `{"version", "window", "steps", "rank 0 of 2": (content,)}`. The last key
        contains the rank, so that ranks have different keys in `torch.distributed.checkpoint`, which can save
        an engine as a `Stateful`. `window` and `steps` are the numbers of completed windows and steps. The
        content of a rank is the loss scale, the order of the buckets, gradients carried over, the state of
        metrics, the residuals of the wire, and the states of the random generators. Save parameters,
        optimizer and scheduler yourself, as usual. On an accelerator every rank must call this at the same
        point, like `synchronize`.

        Raises:
            RuntimeError: called inside a window. The sums of an open window cannot be saved, so a crashed run
                loses at most one window.

        Cost: copies of the residuals and of gradients carried over. The remaining state is small.

        Example:
            >>> for window in sync.windows(loader):  # doctest: +SKIP
            ...     train(window)
            ...     sync.step(optimizer)
            ...     state = {"model": model.state_dict(), "sync": sync.state_dict()}
            ...     torch.save(state, f"rank-{dist.get_rank()}.pt")
        """
        return take_snapshot(self._engine).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`; every rank calls this before its loop.

        Args:
            state: with the same number of ranks, this rank's own state; the run then continues bit for bit.
                With a different number of ranks, the state of any saved rank, for example rank 0's state on
                all ranks; then the residuals of the wire start from zero, and random generators are left
                unchanged. With accumulator="exact" the next window has the same bits on any number of ranks.

        Move the loader past completed windows yourself; `sync.window` counts them over the whole run. The
        random generators are restored when the loop takes the first micro-batch. (Because the loop reads one
        micro-batch ahead, random numbers that the loader drew in this process are not repeated; see
        `pe.sample_rng`.) Use `pe.micro_batch_rng` for random numbers that must not depend on the world size.

        Raises:
            ValueError: a state is damaged or does not fit this engine, or ranks load states from different
                saves. Raised on every rank, without any change.
            RuntimeError: some rank is at another point of its loop. Raised on every rank.

        Example:
            >>> state = torch.load(f"rank-{dist.get_rank()}.pt", weights_only=True)  # doctest: +SKIP
            >>> model.load_state_dict(state["model"])  # doctest: +SKIP
            >>> sync.load_state_dict(state["sync"])  # doctest: +SKIP
            >>> epoch, window = divmod(sync.window, sampler.num_windows)  # doctest: +SKIP
            >>> sampler.set_epoch(epoch, window=window)  # doctest: +SKIP
        """
        load_state(self._engine, state)

    # ---- audit ----

    def audit(self, *, every: int = 100, module: nn.Module | None = None) -> WindowAudit:
        """Check in every `every`-th window, before its optimizer step, that ranks agree.

        The audit compares checksums of parameters, gradients, optimizer state and hyperparameters across
        ranks. The audit also compares the reduced gradients with the micro-batches' gradients, and the
        divisor of the window with its counts. Every rank must call this at the same point, between windows.
        See docs/reliability.md, and `pe.audit` for a loop without an engine.

        Args:
            every: number of windows from one check to the next; the first window is checked.
            module: a module whose buffers are compared too; not needed under `attach`.

        Returns:
            A handle; its `remove()` method ends the audit.

        Raises:
            TypeError, ValueError: an argument is invalid.
            RuntimeError: the engine is audited already or is on an XLA device, or some rank is at another
                point of its loop (raised on every rank).
            AuditError: a check has failed. Raised on every rank when the window is reduced (in `step` or
                clipping). The message gives the difference, its location, the window in which it was first
                found, and the likely cause. The optimizer is not stepped. On an accelerator the error is
                raised when the next window begins.

        Cost: in checked windows, the same as for `pe.audit`; in other windows, none.
        """
        engine = self._engine
        check_device(engine.device)
        if any(isinstance(observer, WindowAudit) for observer in engine.observers):
            raise RuntimeError("this engine is audited already: remove() that audit first")
        every = check_every(every)
        check_same_call(engine, "calls sync.audit, which every rank must call")
        end = engine.observers.remove
        audit = WindowAudit(
            engine.reducer, engine.comm, engine.final, engine.batch, every=every, module=module, end=end
        )
        engine.observers.append(audit)
        return audit


_UNCOUNTED = (
    "no counts of this window were read ahead: loop over sync.windows(loader, count=...), whose function "
    "returns a count for each loss"
)


def _checked_order(norm_type: object) -> float:
    """Return `norm_type` as 2.0 or inf; raise an error for every other norm."""
    if norm_type == "inf":  # torch accepts this string, too
        return math.inf
    if not isinstance(norm_type, Real) or isinstance(norm_type, bool):
        raise TypeError(f"norm_type={norm_type!r} is a {type(norm_type).__name__}: expected 2.0 or inf")
    order = float(norm_type)
    if order not in (2.0, math.inf):
        raise ValueError(
            f"norm_type={norm_type!r}: expected 2.0 or inf; for another norm call "
            "torch.nn.utils.clip_grad_norm_ over the parameters, at the same place"
        )
    return order


_CLIPPED_BY = {"max_norm": "clip_grad_norm_", "clip_value": "clip_grad_value_"}


def _check_limit(name: str, value: object, more: str = "") -> None:
    """Raise an error for a limit that would make gradients nan or change their sign."""
    if isinstance(value, Iterable) and not isinstance(value, str | Tensor):
        raise TypeError(
            f"leave the parameters out, as in sync.{_CLIPPED_BY[name]}(1.0): the engine clips its own "
            f"parameters; {name} is a {type(value).__name__}, expected a non-negative number"
        )
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a non-negative number")
    if not float(value) >= 0:
        raise ValueError(f"{name}={value!r}: expected a non-negative number{more}")


def _checked_groups(
    per: Any, index_of: Mapping[str, int], name_of: Mapping[int, str]
) -> Iterator[tuple[int, ...]]:
    """Yield the parameter indices of each clipping group.

    Args:
        per: the `per` argument of `clip_grad_norm_`.
        index_of: parameter index by name.
        name_of: parameter name by `id` of the parameter.

    Raises:
        TypeError, ValueError: `per` is not a dict of disjoint groups of this engine's parameters.
    """
    if not isinstance(per, Mapping):
        raise TypeError(
            f'per={per!r}: expected "parameter", or a dict with the names or parameters of each group, '
            'for example {"head": model.head.parameters()}'
        )
    if not per:
        raise ValueError("per={}: expected at least one group; leave per out to clip all parameters together")
    group_of: dict[int, str] = {}
    for group, members in per.items():
        if isinstance(members, str | Parameter) or not isinstance(members, Iterable):
            raise TypeError(
                f"per[{group!r}] is a {type(members).__name__}: expected a list of names or parameters"
            )
        indices = []
        for member in members:
            name = member if isinstance(member, str) else name_of.get(id(member))
            index = None if name is None else index_of.get(name)
            if index is None:
                what = repr(member) if isinstance(member, str) else f"a {type(member).__name__}"
                some = ", ".join(map(repr, [*index_of][:3]))
                raise ValueError(
                    f"per[{group!r}] has {what}, which is not one of the engine's parameters: {some}, ..."
                )
            if index in group_of:
                raise ValueError(
                    f"per[{group!r}] has {name!r}, which is already in group {group_of[index]!r}: expected "
                    "disjoint groups"
                )
            group_of[index] = group
            indices.append(index)
        if not indices:
            raise ValueError(
                f"per[{group!r}] is empty: leave the group out (an iterator can be read only once)"
            )
        yield tuple(indices)
