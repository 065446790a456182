"""What all owners of a sharded model's gradients do alike: units, padding, and the shards in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.comm.base import Comm, by_dtype
from pyengine.gradients import published
from pyengine.gradients.ddp.sums import packed
from pyengine.gradients.fsdp.deferral import Choice
from pyengine.gradients.fsdp.private import has_run
from pyengine.gradients.fsdp.replay import keep_buffers
from pyengine.gradients.fsdp.units import Unit, is_counted
from pyengine.gradients.fsdp.unsharded import Unsharded
from pyengine.gradients.slots import local
from pyengine.gradients.sums import SlotNorms
from pyengine.step.stepper import PlainStepper, Stepper


class Sharded:
    """A model that `fully_shard` or `replicate` was called on, whose units reduce when the window says.

    Args:
        model: the outermost unit.
        named: its managed parameters, sharded, in registration order.
        units: its units.
        comm: transport over all ranks of the engine.
        choices: by unit, when it communicates.
        dtype: in which narrow gradients are summed; None for their own.
        watches: whether every micro-batch is checked for inf and nan.

    Attributes:
        names, params, units, comm, choices: as given.
        counted: by parameter, whether this rank counts its shard in the norm.
        held_bytes: what a window holds to communicate less.
        unsharded: what autograd brings.
        norms: parameters of each dtype, and the norm of their shards.
        is_clean: whether FSDP has nothing of a window that did not come to its end.
    """

    stepper: Stepper = PlainStepper()

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, Parameter]],
        units: Sequence[Unit],
        *,
        comm: Comm,
        choices: Sequence[Choice],
        dtype: torch.dtype | None,
        watches: bool,
    ) -> None:
        self.names: Sequence[str] = [name for name, _ in named]
        self.params: Sequence[Parameter] = [param for _, param in named]
        self.counted: Sequence[bool] = [is_counted(param) for param in self.params]
        self.units, self.comm, self.choices = units, comm, choices
        self.held_bytes = sum(choice.held_bytes for choice in choices)
        self._model: Any = model
        for unit in units:
            unit.take(comm)
        deferred = [choice.mode == "all" for choice in choices]
        self.unsharded = Unsharded(model, units, self.params, deferred=deferred, dtype=dtype, watches=watches)
        device = self.params[0].device
        index = {id(param): i for i, param in enumerate(self.params)}
        self.norms = []
        for group in by_dtype(self.params):
            plan = packed([local(param).numel() for param in group])
            self.norms.append((group, SlotNorms(plan, [index[id(p)] for p in group], device)))
        self.is_clean = True
        self._put_back: Callable[[], None] | None = None

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

    def pad(self) -> None:
        """Let the micro-batch handed out be padding: nothing of it stays."""
        self.end_padding()
        self._put_back = keep_buffers(self._model)
        self.unsharded.is_void = True

    def end_padding(self) -> None:
        """Let gradients count again, and put back what the padding's forward has written into buffers."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        self.unsharded.is_void = False

    def scale_(self, scale: Tensor) -> None:
        for params, norms in self.norms:
            norms.scale_(published.parts(params), scale)

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
        if not self.is_clean and has_run(self._model):
            self._model.reset_iter_state()
        self.is_clean = True
