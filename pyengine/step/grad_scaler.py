"""The loss scale: torch's, with its finite check and unscaling in the engine's pass over the gradients."""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.ops.device import send
from pyengine.window.counter import WindowCounter
from pyengine.window.final_pass import FinalPass


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler whose finite check and unscaling are those of the engine's own pass.

    Assign it, or a stock one, which becomes one, to `sync.scaler`; the engine then scales losses in
    `backward`, unscales where it divides by the count, and updates the scale in `step`. In a
    `micro_batch` block the caller scales: `scaler.scale(loss).backward()`. Arguments and state are torch's;
    with equal gradients the parameters stay bit-equal to the stock scaler's (its scales are powers of two).

    Attributes:
        has_scaled: whether it has scaled a loss since the last window was reduced.
    """

    _final: FinalPass | None = None
    _counter: WindowCounter | None = None
    has_scaled = False

    def bind(self, final: FinalPass, counter: WindowCounter) -> None:
        """Use the finite check of `final` from now on; refuse to belong to two engines. In the middle of a
        window of `counter` the scale stays.
        """
        if self._final is not None and self._final is not final:
            raise ValueError(
                "scaler belongs to another engine, whose overflows it follows: make one GradScaler an engine"
            )
        self._final, self._counter = final, counter
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(final.sumsq.device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale, as stock; refused while it belongs to an engine, whose gradients are unscaled once."""
        self._check_free("unscale_", "leave it out, .grad is unscaled from the window's end on")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, as stock; refused while it belongs to an engine, which knows whether to skip."""
        self._check_free("step", "call sync.step(optimizer)")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, as stock; refused while it belongs to an engine, but for a scale of yours."""
        if new_scale is None:
            self._check_free("update", "leave it out, sync.step(optimizer) does it")
        self._check_between("scaler.update")
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as stock; refused in the middle of a window."""
        self._check_between("scaler.load_state_dict")
        super().load_state_dict(state_dict)

    def _check_between(self, what: str) -> None:
        if self._counter is not None and self._counter.is_accumulating:
            raise RuntimeError(
                f"{what} in the middle of window {self._counter.index}, some of whose losses are scaled "
                "already: call it behind sync.step, or drop the window by sync.abandon() first"
            )

    def _check_free(self, what: str, instead: str) -> None:
        if self._final is not None:
            raise RuntimeError(
                f"scaler.{what}: this scaler belongs to an engine since `sync.scaler = scaler`: {instead}"
            )

    def scale(self, outputs: Any) -> Any:
        """Scale losses, as stock."""
        self.has_scaled = True
        scaled = super().scale(outputs)
        return _marked(scaled) if self._enabled else scaled

    def unbind(self) -> None:
        """Belong to no engine any more; scale and its growth stay."""
        self._final = self._counter = None

    def follow(self) -> None:
        """Update the scale after a window that was reduced, by whether it overflowed: on every rank alike."""
        if self._final is not None and self._scale is not None:
            assert self._growth_tracker is not None  # torch makes it with the scale
            torch._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                self._final.overflow,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )

    def current_scale(self) -> Tensor:
        """Return the scale as a 0-dim float32 tensor that later updates leave alone, without a host read."""
        assert self._scale is not None
        return self._scale.clone()

    def settings(self) -> str:
        """Describe what moves the scale; equal on every rank."""
        return (
            f"growth_factor={self._growth_factor}, backoff_factor={self._backoff_factor}, "
            f"growth_interval={self._growth_interval}"
        )

    def inv_scale(self) -> Tensor:
        """Return 1 / scale as a 0-dim float64 tensor, without a host read."""
        return self.current_scale().double().reciprocal()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Sent, not filled in there: for a lazy device they would be constants of its first program.
        self._scale = send([self._init_scale], torch.float32, dev).reshape(())
        self._growth_tracker = send([self._init_growth_tracker], torch.int32, dev).reshape(())


# ---- losses that were scaled already ----

# In the metadata of the graph's node that has scaled.
_MARK = "scaled by a pyengine.GradScaler"
# Nodes that a scaled loss passes through as a term: sums, factors, casts, views.
_LINEAR = re.compile(
    "(Add|Sub|Rsub|Mul|Div|Neg|Sum|Mean|Stack|Cat|Dot|ToCopy|Clone|Alias|Select|Unbind|Index|Slice|Expand|"
    "View|Squeeze|Unsqueeze|ReshapeAlias|UnsafeView)Backward"
)
_MAX_NODES = 64


def is_scaled(loss: Tensor, *, searches: bool) -> bool:
    """Whether a GradScaler has scaled a loss, or a term of it, from its graph alone.

    Args:
        loss: with a graph.
        searches: look for scalers other than `GradScaler`, too, which leave no mark: their product has a
            scale that one of them refers to.

    Cost: 2 µs where the loss is no sum or product. With `searches`, where a factor is a 0-dim float32 tensor,
    tens of milliseconds, in which Python's garbage collector looks for the factor's owner.
    """
    due = deque([loss.grad_fn])
    for _ in range(_MAX_NODES):
        node: Any = due.popleft() if due else None
        if node is None:
            if not due:
                return False
            continue
        if _MARK in node.metadata or (searches and _has_scale(node)):
            return True
        if _LINEAR.match(node.name()):
            due.extend(following for following, _ in node.next_functions)
    return False


def _marked(scaled: Any) -> Any:
    """Mark what `scale` returns: a tensor, a list or tuple, or another iterable, which is read lazily."""
    if isinstance(scaled, Tensor):
        node: Any = scaled.grad_fn
        if node is not None:
            node.metadata[_MARK] = True
        return scaled
    if not isinstance(scaled, list | tuple):
        return map(_marked, scaled)
    for each in scaled:
        _marked(each)
    return scaled


def _has_scale(node: Any) -> bool:
    """Whether a node of the graph multiplies by the scale of some GradScaler."""
    if node.name() != "MulBackward0":
        return False
    try:
        factor = node._saved_other  # noqa: SLF001 - autograd's names for saved tensors
        factor = node._saved_self if factor is None else factor  # noqa: SLF001
    except RuntimeError:  # a second backward, which autograd refuses itself
        return False
    # Numbers are float64 or int64, and a loss that is weighed by another one has a graph.
    if not isinstance(factor, Tensor) or factor.dtype is not torch.float32:
        return False
    return not factor.dim() and not factor.requires_grad and _is_scale(factor, gc.get_referrers(factor))


def _is_scale(factor: Tensor, owners: Sequence[Any]) -> bool:
    """Whether a tensor is the scale of some GradScaler, or a copy; `owners` refer to it."""
    if any(_attribute(owner, "GradScaler", "_scale") is factor for owner in owners):
        return True
    # `scale` of a list multiplies by a copy for each device. The dict of copies is part of a cycle, which
    # lives until Python's next collection.
    copies = [owner for owner in owners if type(owner) is dict and owner.get(factor.device) is factor]
    return any(
        _attribute(owner, "_MultiDeviceReplicator", "_per_device_tensors") is each
        for each in copies
        for owner in gc.get_referrers(each)
    )


def _attribute(owner: Any, kind: str, name: str) -> Any:
    """Return an attribute of an object, if a class of it is called `kind`, or of a `__dict__`."""
    if any(each.__name__ == kind for each in type(owner).__mro__):
        owner = vars(owner)
    return owner.get(name) if type(owner) is dict else None


def taken_over(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler as one that an engine can use: a stock one becomes it, with its arguments and state."""
    kind = type(scaler)
    if kind.__name__ == "GradScaler" and kind.__module__.startswith("torch."):  # each device has had its own
        scaler.__class__ = GradScaler
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler is a {type(scaler).__name__}: need a torch.amp.GradScaler, which the engine takes over, "
            "or a pyengine.GradScaler; the ways of another kind would be lost"
        )
    return scaler


def copy_of(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler for one engine, of the same arguments and state, where several share a stock one."""
    if type(scaler) not in (torch.amp.GradScaler, GradScaler):
        raise TypeError(
            f"the loss scaler is a {type(scaler).__name__}, whose own ways would be lost: need a "
            "torch.amp.GradScaler, which the engine takes over, or a pyengine.GradScaler"
        )
    ours = GradScaler(scaler._device, enabled=scaler.is_enabled())  # noqa: SLF001 - torch has no public name for it
    ours.load_state_dict(scaler.state_dict())
    return ours
