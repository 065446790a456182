"""The modes of `train`: pyengine on a bare model, pyengine on DDP, and plain DDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from pyengine.cli.gradient_measures import measure_noise_scale
from pyengine.cli.tasks.base import Batch, Task, make_optimizer
from pyengine.cli.train.arguments import TrainSettings
from pyengine.comm import TorchDist
from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord
from pyengine.window.metric import GradNorms
from pyengine.wire.named import WIRES

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WARM_UP_STEPS = 10
_MAX_NORM = 1.0


def build(task: Task, settings: TrainSettings) -> nn.Module:
    """Build the model, with the same parameters in every call and on every rank."""
    torch.manual_seed(settings.seed)
    return task.build().to(_DTYPES[settings.dtype])


def batches(task: Task, settings: TrainSettings, rank: int, *, seed: int) -> Iterator[Batch]:
    """Yield a rank's micro-batches indefinitely."""
    size, world_size = settings.micro_batch[task.name], dist.get_world_size()
    return task.batches(rank=rank, world_size=world_size, micro_batch=size, seed=seed)


def _optimizer(
    task: Task, model: nn.Module, settings: TrainSettings
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    lr, steps = settings.lr[task.name], settings.steps[task.name]
    return make_optimizer(model, lr, steps=steps, warm_up_steps=_WARM_UP_STEPS)


def pop_gradient(model: nn.Module) -> Tensor:
    """Return all gradients as one flat float64 vector, and clear them."""
    params = list(model.parameters())
    flat = torch.cat([param.grad.double().reshape(-1) for param in params if param.grad is not None])
    for param in params:
        param.grad = None
    return flat


class Windowed:
    """Training with pyengine, on a bare model or on DDP (`on_ddp`)."""

    def __init__(self, task: Task, model: nn.Module, settings: TrainSettings, *, on_ddp: bool) -> None:
        self.model, self._task = model, task  # `model` is the unwrapped module
        self._accumulate = settings.accumulate
        self._ddp = DistributedDataParallel(model) if on_ddp else None
        make: Callable[..., Sync] = GradSync if self._ddp is None else attach
        self._module = self._ddp or model
        self._sync = make(
            self._module,
            accumulate=settings.accumulate,
            wire=WIRES[settings.wire],
            accumulator=settings.accumulator,
        )
        self.label = "pyengine on DDP" if on_ddp else "pyengine"
        self._optimizer, self._schedule = _optimizer(task, model, settings)
        self.parts: dict[str, Any] = {  # objects that a checkpoint has to contain
            "model": model,
            "optimizer": self._optimizer,
            "schedule": self._schedule,
            "sync": self._sync,
        }
        self._records: list[StepRecord] = []
        self._sync.on_step(self._records.append)

    @property
    def buckets(self) -> int:
        """The number of gradient buckets."""
        return len(self._sync.layout.buckets)

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """Train on the micro-batches, one window per step; yield the record of each step."""
        for window in self._sync.windows(batches):
            self._backward(window)
            self._sync.clip_grad_norm_(_MAX_NORM)
            self._sync.step(self._optimizer, self._schedule)
            yield self._records.pop()

    def measure(self) -> None:
        """Measure gradient norms and the noise scale in every window."""
        self._sync.measure(GradNorms())
        measure_noise_scale(self._sync, parts=dist.get_world_size() * self._accumulate)

    def gradient(self, batches: Sequence[Batch]) -> Tensor:
        """Return the flat gradient of one window of any length, without taking a step."""
        for window in self._sync.windows(batches):
            self._backward(window)
            self._sync.unscale_()
        return pop_gradient(self.model)

    def _backward(self, window: Iterable[Batch]) -> None:
        for batch in window:
            loss, count = self._task.loss(self._module, batch)
            self._sync.backward(loss, count=count)


class PlainDDP:
    """DDP with the usual gradient accumulation: divided losses, and an all-reduce in every backward.

    Args:
        counted: whether to count collectives and bytes in a hook that averages gradients as DDP itself does.
    """

    label = "plain DDP"

    def __init__(self, task: Task, model: nn.Module, settings: TrainSettings, *, counted: bool) -> None:
        self.model, self._task = model, task
        self._accumulate = settings.accumulate
        self._ddp = DistributedDataParallel(model)
        self._meter = _Meter()
        if counted:
            self._ddp.register_comm_hook(self._meter, _all_reduce_and_count)
        self._optimizer, self._schedule = _optimizer(task, model, settings)
        self.parts: dict[str, Any] = {}  # plain DDP saves no checkpoints
        self._step = 0

    @property
    def buckets(self) -> int:
        return len(self._ddp.reducer._get_zeros_like_grad_buckets())  # noqa: SLF001 - DDP has no public count

    def measure(self) -> None:
        """Do nothing: plain DDP has no engine that could measure."""

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        source, meter = iter(batches), self._meter
        while window := [batch for _, batch in zip(range(self._accumulate), source, strict=False)]:
            meter.restart()
            totals = torch.stack([self._backward(batch) for batch in window]).sum(0)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            dist.all_reduce(totals)  # not counted, because only the step record needs this all-reduce
            loss, count = totals.tolist()
            yield StepRecord(
                step=self._step,
                micro_batches=len(window) * dist.get_world_size(),
                count=count,
                loss=loss / count,
                grad_norm=float(norm),
                skipped=False,
                reason="",
                bytes_on_wire=meter.comm.traffic.bytes_sent,
                collectives=meter.comm.traffic.collectives,
                backward_s=meter.backward_s,
                exposed_sync_s=meter.exposed_sync_s,
                step_s=time.perf_counter() - meter.start,
            )
            self._step += 1

    def gradient(self, batches: Sequence[Batch]) -> Tensor:
        for batch in batches:
            self._backward(batch)
        return pop_gradient(self.model)

    def _backward(self, batch: Batch) -> Tensor:
        loss, count = self._task.loss(self._ddp, batch)
        with self._meter.backward():
            (loss / count / self._accumulate).backward()
        return torch.tensor([float(loss.detach()), count], dtype=torch.float64)


Mode = Windowed | PlainDDP


def make(mode: str, task: Task, settings: TrainSettings, *, counted: bool = True) -> Mode:
    """Create a mode with a new model; `counted` makes plain DDP a little slower."""
    model = build(task, settings)
    if mode == "ddp":
        return PlainDDP(task, model, settings, counted=counted)
    return Windowed(task, model, settings, on_ddp=mode == "ddp-hook")


class _Meter:
    """Counts DDP's traffic in a window as pyengine does, and measures how long each backward waits."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.comm = TorchDist(None, torch.device("cpu"))
        self.backward_s = self.exposed_sync_s = 0.0
        self.start = time.perf_counter()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward, and measure how long it waits after its last bucket is ready."""
        self.computed: float | None = None
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.backward_s += end - start
        self.exposed_sync_s += end - (self.computed or end)


def _all_reduce_and_count(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses string annotations
    """Average over ranks, as DDP does without a hook."""
    if bucket.is_last():
        state.computed = time.perf_counter()
    flat = bucket.buffer().div_(state.comm.world_size)
    return state.comm.all_reduce(flat).get_future().then(partial(_value, flat))


def _value(flat: Tensor, future: Any) -> Tensor:
    future.value()  # raises the error of a failed collective
    return flat
