"""What all owners of a sharded model's gradients do alike: units, padding, and the shards in `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.arrival import leaves_behind
from pyengine.gradients.base import Reducer
from pyengine.gradients.fsdp.deferral import Choice
from pyengine.gradients.fsdp.private import has_run, reduce_dtype, reset_iter_state
from pyengine.gradients.fsdp.replay import keep_buffers
from pyengine.gradients.fsdp.traffic import ShardWire
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.fsdp.unsharded import Unsharded
from pyengine.gradients.marks import BARE
from pyengine.gradients.settings import Settings
from pyengine.gradients.used_anywhere import UsedAnywhere
from pyengine.step.stepper import PlainStepper, Stepper


@dataclass(frozen=True)
class Managed:
    """What an engine drives of a model that `fully_shard` or `replicate` was called on.

    Attributes:
        model: the outermost unit.
        named: its managed parameters, sharded, in registration order.
        units: its units.
        choices: by unit, when it communicates.
        counted: by parameter, whether this rank counts what it holds of it in the norm.
        comm: transport over all ranks of the engine.
        settings: the engine's arguments.
    """

    model: nn.Module
    named: Sequence[tuple[str, Parameter]]
    units: Sequence[Unit]
    choices: Sequence[Choice]
    counted: Sequence[bool]
    comm: Comm
    settings: Settings


class Sharded(Reducer):
    """A sharded model whose units reduce when the window says.

    Args:
        managed: what of it is driven.
        widens: whether a micro-batch's narrow gradients are summed in the type in which their unit reduces;
            False keeps the bits that autograd has given them.
        watches: whether every micro-batch is checked for inf and nan.

    Attributes:
        model: the outermost unit.
        names, params: of the managed parameters.
        units, comm, choices, counted: as managed.
        wire: how gradients are scattered.
        held_bytes: what a window holds to communicate less.
        unsharded: what autograd brings.
        used: tells ranks which parameters each of them has used.
        is_clean: whether FSDP has nothing of a window that did not come to its end.
    """

    has_collective_forwards = True
    saves_parts = False  # its states have whole sums and residuals

    def __init__(self, managed: Managed, *, watches: bool, widens: bool = True) -> None:
        self.stepper: Stepper = PlainStepper()
        self.names: Sequence[str] = [name for name, _ in managed.named]
        self.params: Sequence[Parameter] = [param for _, param in managed.named]
        self.counted: Sequence[bool] = managed.counted
        self.units, self.comm, self.choices = managed.units, managed.comm, managed.choices
        self.held_bytes = sum(choice.held_bytes for choice in self.choices)
        self.model: Any = managed.model
        self._is_apart = managed.settings.drops
        self.wire = ShardWire(managed.settings.wire, managed.comm)
        self.used = UsedAnywhere(self.comm, self.params[0].device)
        names = {id(param): name for name, param in managed.named}
        for unit in self.units:
            unit.take(self.wire, names)
        deferred = [choice.mode == "all" for choice in self.choices]
        dtypes = [reduce_dtype(unit.module) for unit in self.units]
        self.unsharded = Unsharded(
            managed.model,
            self.units,
            self.params,
            deferred=deferred,
            dtypes=dtypes,
            watches=watches,
            apart=managed.settings.drops,
            widens=widens,
        )
        self.is_clean = True
        self._has_warned = False
        # Weakly: hooks of parameters hold `unsharded`, and are not seen by Python's collector.
        warn = WeakMethod(self._warn_of_bare_backwards)
        self.unsharded.on_return = lambda: own() if (own := warn()) is not None else None
        self._put_back: Callable[[], None] | None = None
        # Gradients of the caller's leaves while padding runs: each with its leaf, by the leaf's id.
        self._spared: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._ignored = [param for param in managed.model.parameters() if id(param) not in names]

    def open(self) -> None:
        """Let earlier backwards reduce what is not deferred."""
        self.reset()
        self.end_padding()
        self.is_clean = False
        for unit, choice in zip(self.units, self.choices, strict=True):
            unit.open(choice.mode, keeps=choice.keeps)

    def begin(self) -> None:
        for param in self.params:
            param.grad = None
        self.unsharded.begin()
        super().begin()

    def staged(self) -> Sequence[Any]:
        return self.unsharded.staged()

    def pad(self) -> None:
        """Let the micro-batch handed out be padding: nothing of it stays."""
        self.end_padding()
        self._put_back = keep_buffers(self.model)
        self.unsharded.is_void = True

    def spare(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        ours = {id(param) for param in self.unsharded.staged()}
        for leaf in [*self._ignored, *leaves_behind(roots)]:
            if id(leaf) not in ours and id(leaf) not in self._spared:
                self._spared[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def end_padding(self) -> None:
        """Let gradients count again, and put back what padding has written into buffers and into gradients
        of the caller's.
        """
        for leaf, grad in self._spared.values():
            leaf.grad = grad
        self._spared = {}
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        self.unsharded.is_void = False

    def _warn_of_bare_backwards(self) -> None:
        """Warn once if two backwards have run between windows: no step will use their gradients."""
        if self.is_clean and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{BARE}: outside of a window no unit of the model reduces its gradients, and .grad stays as "
                "it is. (Call sync.close() where that is meant)",
                stacklevel=2,
            )

    def strays(self) -> Sequence[int]:
        return sorted(self.unsharded.strays)

    def forget_strays(self) -> None:
        self.unsharded.strays.clear()

    def release(self, *, keeps_grad: bool) -> None:
        """Leave the units as they were; they reduce in every backward again."""
        self.reset()
        self.end_padding()
        self.unsharded.release()
        for unit in self.units:
            unit.release()
        if not keeps_grad:
            for param in self.params:
                param.grad = None

    def reset(self) -> None:
        """Let FSDP forget a window that did not come to its end."""
        if not self.is_clean and has_run(self.model):
            reset_iter_state(self.model)
        self.is_clean = True
