"""Who moves the gradients: pyengine in one of its two forms, or plain DDP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.cli.tasks.base import Batch, Task
from pyengine.cli.train import gradient as train_gradient
from pyengine.cli.train import optimizer as train_optimizer
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.plain_ddp import PlainDDP, num_buckets
from pyengine.cli.wires import WIRES
from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Mode(Protocol):
    """A model in training.

    Attributes:
        model: the bare module.
        label: what tables call it.
    """

    model: nn.Module
    label: str

    @property
    def buckets(self) -> int:
        """Buckets that the gradients travel in."""

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by name."""

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """Train on the micro-batches, a window a step; yield what happened in each."""

    def gradient(self, batches: Sequence[Batch]) -> Tensor:
        """Return the gradient of one window, however short, flat; does not step."""


def build(task: Task, settings: Settings) -> nn.Module:
    """Build the model, with the same parameters at every call and on every rank."""
    torch.manual_seed(settings.seed)
    return task.build().to(_DTYPES[settings.dtype])


def make(mode: str, task: Task, settings: Settings, *, counted: bool = True) -> Mode:
    """Build the model and who moves its gradients.

    Args:
        mode: as on the command line.
        counted: whether plain DDP is to count what it sends, which costs it a little time. pyengine always
            counts.
    """
    model = build(task, settings)
    if mode == "ddp":
        return PlainDDP(task, model, settings, counted=counted)
    return OnDDP(task, model, settings) if mode == "ddp-hook" else OnEngine(task, model, settings)


class _Windowed:
    """The loop over windows that both forms of pyengine share."""

    def __init__(
        self, task: Task, model: nn.Module, settings: Settings, *, module: nn.Module, sync: Sync
    ) -> None:
        self.model, self._task, self._clip = model, task, settings.clip
        self._module, self._sync = module, sync
        self._optimizer, self._schedule = train_optimizer.make(task.name, model, settings)
        self._records: list[StepRecord] = []
        sync.on_step(self._records.append)

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by name."""
        names = ("model", "optimizer", "schedule", "sync")
        return dict(zip(names, (self.model, self._optimizer, self._schedule, self._sync), strict=True))

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """Train; yield what happened in each window."""
        for window in self._sync.windows(batches):
            self._backward(window)
            self._sync.clip_grad_norm_(self._clip)
            self._sync.step(self._optimizer, self._schedule)
            yield self._records.pop()

    def gradient(self, batches: Sequence[Batch]) -> Tensor:
        """Return the gradient of one window, however short, flat; does not step."""
        for window in self._sync.windows(batches):
            self._backward(window)
            self._sync.unscale_()
        return train_gradient.take(self.model)

    def _backward(self, window: Iterable[Batch]) -> None:
        for batch in window:
            loss, count = self._task.loss(self._module, batch)
            self._sync.backward(loss, count=count)


class OnEngine(_Windowed):
    """`GradSync`: the engine owns flat gradient buckets."""

    label = "pyengine"

    def __init__(self, task: Task, model: nn.Module, settings: Settings) -> None:
        wire = WIRES[settings.wire]
        sync = GradSync(model, accumulate=settings.accumulate, wire=wire, accumulator=settings.accumulator)
        super().__init__(task, model, settings, module=model, sync=sync)
        self.buckets = len(sync.layout.buckets)


class OnDDP(_Windowed):
    """`attach`: DDP's buckets, driven by the engine."""

    label = "pyengine on DDP"

    def __init__(self, task: Task, model: nn.Module, settings: Settings) -> None:
        self._ddp = DistributedDataParallel(model)
        wire = WIRES[settings.wire]
        sync = attach(self._ddp, accumulate=settings.accumulate, wire=wire, accumulator=settings.accumulator)
        super().__init__(task, model, settings, module=self._ddp, sync=sync)

    @property
    def buckets(self) -> int:
        """Buckets that DDP has made."""
        return num_buckets(self._ddp)
