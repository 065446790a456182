"""Plain DistributedDataParallel with gradient accumulation as it is usually written, and what that sends.

No string annotations here: DDP inspects the hook's signature.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pyengine.cli.tasks.base import Batch, Task
from pyengine.cli.train import gradient as train_gradient
from pyengine.cli.train import optimizer as train_optimizer
from pyengine.cli.train.arguments import Settings
from pyengine.comm import TorchDist
from pyengine.step.step_record import StepRecord


class PlainDDP:
    """The mean loss over `accumulate`, and an all-reduce in every backward.

    Args:
        counted: count collectives and bytes in a hook that does what DDP does without one, at the cost of a
            little time.
    """

    label = "plain DDP"

    def __init__(self, task: Task, model: nn.Module, settings: Settings, *, counted: bool) -> None:
        self.model, self._task = model, task
        self._clip, self._accumulate = settings.clip, settings.accumulate
        self._ddp = DistributedDataParallel(model)
        self._meter = _Meter()
        if counted:
            self._ddp.register_comm_hook(self._meter, _all_reduce_and_count)
        self._optimizer, self._schedule = train_optimizer.make(task.name, model, settings)
        self._step = 0

    @property
    def buckets(self) -> int:
        """Buckets that DDP has made."""
        return num_buckets(self._ddp)

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by name; no checkpoint is made of it."""
        return {}

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """Train; yield what happened in each window."""
        source = iter(batches)
        while window := [batch for _, batch in zip(range(self._accumulate), source, strict=False)]:
            self._meter.restart()
            totals = torch.stack([self._backward(batch) for batch in window]).sum(0)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            dist.all_reduce(totals)  # for the record only: not a gradient, not counted
            yield self._record(window, float(norm), *totals.tolist())

    def gradient(self, batches: Sequence[Batch]) -> Tensor:
        """Return the gradient of one window, however short, flat; does not step."""
        for batch in batches:
            self._backward(batch)
        return train_gradient.take(self.model)

    def _backward(self, batch: Batch) -> Tensor:
        loss, count = self._task.loss(self._ddp, batch)
        with self._meter.backward():
            (loss / count / self._accumulate).backward()
        return torch.tensor([float(loss.detach()), count], dtype=torch.float64)

    def _record(self, window: list[Batch], norm: float, loss: float, count: float) -> StepRecord:
        meter, self._step = self._meter, self._step + 1
        return StepRecord(
            step=self._step - 1,
            micro_batches=len(window) * dist.get_world_size(),
            count=count,
            loss=loss / count,
            grad_norm=norm,
            skipped=False,
            reason="",
            bytes_on_wire=meter.comm.traffic.bytes_sent,
            collectives=meter.comm.traffic.collectives,
            backward_s=meter.backward_s,
            exposed_sync_s=meter.exposed_sync_s,
            step_s=time.perf_counter() - meter.start,
        )


def num_buckets(ddp: DistributedDataParallel) -> int:
    """Return the number of buckets that DDP reduces in one backward."""
    return len(ddp.reducer._get_zeros_like_grad_buckets())  # noqa: SLF001 - DDP counts them nowhere else


class _Meter:
    """What DDP sends in a window, counted as pyengine counts,
    and how long its backwards only waited for it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        self.comm = TorchDist(None, torch.device("cpu"))
        self.backward_s = self.exposed_sync_s = 0.0
        self.start = time.perf_counter()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward, and its part after the last bucket was handed out: from then on it waits."""
        self.computed: float | None = None
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.backward_s += end - start
        self.exposed_sync_s += end - (self.computed or end)


def _all_reduce_and_count(state: _Meter, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Do what DDP does without a hook: the mean over ranks."""
    if bucket.is_last():
        state.computed = time.perf_counter()
    flat = bucket.buffer().div_(state.comm.world_size)
    return state.comm.all_reduce(flat).get_future().then(partial(_landed, flat))


def _landed(flat: Tensor, future: Any) -> Tensor:
    future.value()  # raises what broke the collective
    return flat
