"""A micro-batch whose backwards are the caller's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from pyengine.engine.engine import Engine
from pyengine.engine.open_window import OpenWindow
from pyengine.engine.parts import Parts
from pyengine.ops.device import HOST, runs_ahead
from pyengine.window.counter import State
from pyengine.window.header import Count, checked_count


@contextmanager
def micro_batch(engine: Engine, count: Count, *, says: bool = True) -> Iterator[MicroBatch]:
    """Make the body one micro-batch of the window; see `Sync.micro_batch`.

    Args:
        count: checked.
        says: whether it is the caller's own, or read ahead.
    """
    with engine.alone():
        made = MicroBatch(engine.current, engine.parts, count, says=says)
        with made.running():
            yield made


def checked_backward(
    loss: Tensor,
    *,
    gradient: Tensor | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> Callable[[Tensor], None]:
    """Return the backward of a loss, to be run on the scaled one, or raise before anything has run.

    Args:
        loss: 0-dim, or of the shape of `gradient`.
        gradient, retain_graph, create_graph, inputs: as `torch.Tensor.backward`.

    Raises:
        ValueError: no backward can start here.
    """
    if not isinstance(loss, Tensor) or (loss.dim() != 0 and gradient is None):
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss: got {shape}, need a 0-dim tensor; reduce it with sum (count=items) or mean")
    if not loss.requires_grad:
        raise ValueError(
            "loss: requires no gradient: it was detached or computed under no_grad, or every parameter "
            "in it is frozen"
        )
    if gradient is not None and gradient.shape != loss.shape:
        raise ValueError(
            f"gradient has shape {list(gradient.shape)}, need that of the loss, {list(loss.shape)}"
        )
    wanted = [inputs] if isinstance(inputs, Tensor) else inputs
    if wanted is not None and not (len(wanted) and all(item.requires_grad for item in wanted)):
        raise ValueError("inputs: need at least one tensor, and all that require a gradient; or leave it out")
    return lambda scaled: torch.autograd.backward(
        scaled, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=wanted
    )


def backward(
    engine: Engine, loss: Tensor, count: Count, run: Callable[[Tensor], None], *, is_told: bool = True
) -> None:
    """Make one backward a micro-batch of the window; see `Sync.backward`.

    Args:
        loss: what it starts from.
        count: checked.
        run: the backward, given the loss times the loss scale.
        is_told: whether the record tells the loss, 0-dim.
    """
    warn_of_division(engine.parts, loss)
    scaler = engine.parts.scaler
    with micro_batch(engine, count) as made:
        made.loss = loss if is_told else None
        scaled = loss if scaler is None else scaler.scale(loss)
        with made.only_backward(scaled):
            run(scaled)


# A loss may be cast, negated, and multiplied by a count, behind the division.
_SCALINGS = {"DivBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"}


def warn_of_division(parts: Parts, loss: Tensor) -> None:
    """Warn once, in an engine's first window, of a loss that was divided by the micro-batches of a window.

    Args:
        parts: of the engine.
        loss: whose graph is read; of its values nothing, and no tensor on an accelerator.
    """
    accumulate, world_size = parts.counter.accumulate, parts.comm.world_size
    if parts.counter.index or accumulate == 1 or "division" in parts.warned:
        return
    node = loss.grad_fn
    while node is not None and node.name() in _SCALINGS:
        factor = _factor(node)
        for divisor in {accumulate, accumulate * world_size}:
            if factor is not None and math.isclose(factor * divisor, 1.0, rel_tol=1e-6):
                parts.warned.add("division")
                warnings.warn(
                    f"leave the division by {divisor} out of the loss, if it stands for "
                    f"accumulate={accumulate}: the engine divides by what all micro-batches count, and with "
                    "both the gradient is that much too small. (Where it is something else, such as the size "
                    "of a batch, the loss is right.)",
                    stacklevel=2,
                )
                return
        node = next((following for following, _ in node.next_functions if following is not None), None)


def _factor(node: Any) -> float | None:
    """Return the number by which a node of the graph multiplies; None where it is no number of the host."""
    is_product = node.name() == "MulBackward0"
    other = getattr(node, "_saved_other", None)
    if other is None and is_product:
        other = node._saved_self
    if not isinstance(other, Tensor) or other.dim() or runs_ahead(other.device):
        return None
    value = float(other)
    if is_product:
        return value
    return 1 / value if value else None


class MicroBatch:
    """One micro-batch of a window, while its backwards run; made by `sync.micro_batch`.

    Its gradient is what the backwards in the block have added up. What a block without a backward adds to the
    gradient is zero; its count counts.
    """

    def __init__(self, window: OpenWindow, parts: Parts, count: Count, *, says: bool) -> None:
        parts.counter.check_backward()
        self._window, self._parts = window, parts
        self._index, self._syncs = parts.counter.done, parts.counter.next_backward_syncs
        self._ends_run = self._syncs or window.is_padding or window.runs.ends_at(parts.counter.latest)
        self._count: Count = count
        self._says_count = says or window.denominators is not None
        self._loss: Tensor | None = None
        self._has_last = self._has_only = False

    @property
    def count(self) -> Count:
        """Items in the losses: a number or a 0-dim tensor; may be set until the last backward begins."""
        return self._count

    @count.setter
    def count(self, count: Count) -> None:
        self._check_open("count")
        if self._window.denominators is not None:
            raise ValueError(
                "mb.count: this window's counts were read ahead by sync.windows(loader, count=...): leave it"
            )
        self._count, self._says_count = checked_count(count), True

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
        self._window.has_backward |= value is not None

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
        warn_of_division(self._parts, loss)
        scaler = self._parts.scaler
        self._window.has_backward = True
        run(loss if scaler is None else scaler.scale(loss))

    @contextmanager
    def last_backward(self, *roots: Tensor) -> Iterator[None]:
        """Say that the block's last backward runs in the body.

        In the window's last micro-batch the header goes first, and each bucket leaves as soon as the body has
        completed it; in an earlier one gradients are accumulated from inside it, while the cache has them. So
        `count` and `loss` are settled here, and no gradient may come after the body.

        Args:
            roots: what the body's backward starts from (the scaled losses, or any tensors behind the same
                graph). Without them nothing overlaps under DDP's find_unused_parameters=True, nor in an
                engine's very first last backward.

        Raises:
            RuntimeError: the second one of a block; or a gradient came again after its bucket could leave.
        """
        if self._has_last:
            raise RuntimeError(
                "mb.last_backward: the second one of this micro-batch, whose gradients have been "
                "accumulated: mark the last backward only"
            )
        with self._last(roots):
            yield
        self._parts.marks.take()

    @contextmanager
    def only_backward(self, root: Tensor) -> Iterator[None]:
        """As `last_backward`, where no code but the engine's runs in the rest of the block."""
        self._has_only = True
        with self._last((root,)):
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the body run the backwards; then accumulate, and send if this is the window's last."""
        window, parts = self._window, self._parts
        window.begin()
        self._check_turn()
        due = parts.counter.done + 1 < parts.counter.handed
        try:
            with (
                window.clock.phase("backward"),
                parts.batch_norms.micro_batch(due=due),
                self._sparing(),
            ):
                yield
                self._end()
            if self._syncs and parts.counter.state is State.OPEN:
                window.send()
        except BaseException as error:
            if parts.counter.state is State.OPEN:
                window.counts.refusals.append(
                    f"micro-batch {self._index} was left by an exception ({error!r}), and its gradient may "
                    "not be whole"
                )
            raise
        finally:
            parts.marks.take()

    @contextmanager
    def _last(self, roots: Sequence[Tensor]) -> Iterator[None]:
        parts, reducer = self._parts, self._parts.reducer
        self._has_last = self._window.has_backward = True
        parts.batch_norms.stop_counting()
        if parts.dropping is not None:
            yield  # nothing is added, or leaves, before all of it is known
            return
        self._note()
        if self._syncs and reducer.overlaps:
            with self._window.sending() as header, reducer.overlap(header, roots):
                yield
        elif not self._ends_run:
            with reducer.keep():
                yield
        else:
            with reducer.add():
                yield

    def _end(self) -> None:
        """Accumulate what is left, and refuse what cannot be right."""
        if not self._has_only:
            self._refuse_wrong()
        if not self._has_last or self._parts.dropping is not None:
            self._note()
            if self._ends_run:
                self._parts.reducer.collect()

    def _sparing(self) -> AbstractContextManager[object]:
        """Let backwards of padding leave no trace in gradients that are not the engine's."""
        if not self._window.is_padding:
            return nullcontext()
        self._parts.reducer.spare(())
        return _BeforeBackward(self._parts.reducer.spare)

    def _check_turn(self) -> None:
        """Refuse a backward that is not that of the micro-batch handed out last, where it matters whose it
        is.
        """
        window, counter = self._window, self._parts.counter
        if window.runs.size == 1 or counter.handed == counter.done + 1:
            return
        text = (
            f"micro-batches of window {counter.index} were taken before the backwards of earlier ones had "
            "run, and accumulator=pe.Exact(slots=...) sums those of a slot in order: run the backward of "
            "each before the next one is taken, and where there is none say "
            "`with sync.micro_batch(count=0): pass`"
        )
        if text not in window.counts.refusals:
            window.refuse(text)

    def _refuse_wrong(self) -> None:
        parts, scaler = self._parts, self._parts.scaler
        has_new = bool(parts.marks.changed())
        if self._has_last and has_new:
            self._window.refuse(
                f"a gradient came after mb.last_backward of micro-batch {self._index}: mark the backward "
                "that is the last, or leave the mark out"
            )
        if scaler is not None and not scaler.has_scaled and (self._has_last or has_new):
            self._window.refuse(
                f"the losses of micro-batch {self._index} were not scaled, and sync.scaler is set: call "
                "sync.scaler.scale(loss).backward(), or sync.backward(loss), which scales"
            )

    def _note(self) -> None:
        """Count this micro-batch; the window's header may go. One with inf or nan brings nothing, where such
        are dropped.
        """
        parts = self._parts
        parts.counter.count_backward()
        self._window.counts.is_silent |= not self._says_count
        is_dropped: bool | Tensor = False
        if parts.dropping is not None:
            is_dropped = parts.dropping.look(self._index, self._loss)
            parts.batch_norms.drop(is_dropped)
        if not self._window.is_padding:
            self._window.runs.add(ends=self._ends_run)
            self._window.counts.append(self._loss, self._count, is_dropped=is_dropped)

    def _check_open(self, what: str) -> None:
        if self._has_last:
            raise RuntimeError(
                f"mb.{what} is set after the last backward has begun, when the header may have gone: set it "
                "before"
            )


class _BeforeBackward(TorchFunctionMode):
    """Calls `action(roots)` before every backward that the body runs on its thread, `loss.backward()` too."""

    def __init__(self, action: Callable[[Sequence[Tensor | GradientEdge]], None]) -> None:
        super().__init__()
        self._action = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._action(args[:1])
        elif func is torch.autograd.backward:
            self._action(args[0])
        return func(*args, **(kwargs or {}))
