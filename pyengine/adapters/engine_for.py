"""Create engines for models that another library has prepared, and run the library's backward calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.fsdp.deferral import Deferral
from pyengine.gradients.settings import Accumulator, NonFinite, Settings, as_accumulator
from pyengine.step.grad_scaler import copy_of
from pyengine.window.header import Count
from pyengine.wire import FP32
from pyengine.wire.named import WireLike, as_wire

_OPTIONS = ("gradient", "retain_graph", "create_graph", "inputs")


class EngineSettings:
    """The settings of an engine as class attributes; see `pe.GradSync`."""

    wire: WireLike = FP32()
    accumulator: Accumulator | torch.dtype = "fp32"
    nonfinite: NonFinite = "skip"

    def _settings(self, accumulate: int) -> Settings:
        return Settings(accumulate, as_wire(self.wire), as_accumulator(self.accumulator), self.nonfinite)


def engine_for(
    model: nn.Module,
    settings: Settings,
    *,
    scaler: torch.amp.GradScaler | None = None,
    deferral: Deferral = Deferral(),  # noqa: B008 - frozen
    is_bare: bool = False,
) -> Sync:
    """Create the engine for a prepared model.

    The engine attaches to DDP and FSDP2, and owns the gradients of an unwrapped model. With several
    processes, an unwrapped model raises TypeError, unless the library leaves the reduction of its gradients
    to the engine (`is_bare`). The engine has a separate loss scaler, which starts from the state of the
    library's scaler.
    """
    options: dict[str, Any] = {
        "accumulate": settings.accumulate,
        "wire": settings.wire,
        "accumulator": settings.accumulator,
        "nonfinite": settings.nonfinite,
    }
    if isinstance(model, FSDPModule):
        sync = attach(model, **options, defer=deferral.defer, defer_budget_mb=deferral.budget_mb)
    elif deferral != Deferral():
        raise TypeError(
            f"{deferral}, but the prepared model is a {type(model).__name__}: both arguments are for models "
            "sharded by FSDP2; leave them out"
        )
    elif isinstance(model, DistributedDataParallel):
        sync = attach(model, **options)
    elif not is_bare and dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"the prepared model is a {type(model).__name__}; with several processes, expected a "
            "DistributedDataParallel or a model sharded by FSDP2. Compile the module before it is prepared; "
            "FSDP1 and DeepSpeed reduce gradients themselves"
        )
    else:
        sync = GradSync(model, **options)
    sync.scaler = None if scaler is None else copy_of(scaler)
    return sync


def is_window_new(sync: Sync) -> bool:
    """Return whether the next micro-batch is the first micro-batch of its window."""
    return len(sync.due) == sync.gradient_accumulation_steps


def abandon_open_window(sync: Sync) -> None:
    """Drop a window that the library's loop left unfinished, before the loop begins the next window."""
    if not is_window_new(sync):
        sync.abandon()


def allow_windows_of(sync: Sync, steps: int) -> None:
    """Allow up to `steps` micro-batches in the window that begins now and in later windows.

    If a window is shorter, the library's loop ends it.
    """
    if steps > sync.gradient_accumulation_steps and is_window_new(sync):
        try:
            sync.gradient_accumulation_steps = steps
        except ValueError as error:
            raise ValueError(
                f"begin the training with the largest number of micro-batches per window, {steps}; callbacks "
                f"can lower it later: {error}"
            ) from None


def backward(sync: Sync, loss: Tensor, *, count: Count | None, options: dict[str, Any]) -> None:
    """Run the backward of one micro-batch, or one backward of a `sync.micro_batch` block."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError(
            f"backward: unexpected arguments {', '.join(unknown)}. The engine runs the backward itself, so "
            f"pass only the loss, its count, and options of torch's backward ({', '.join(_OPTIONS)})"
        )
    running = sync.running_micro_batch
    if running is None:
        sync.backward(loss, count=count, **options)
        if sync.is_sync_step:
            sync.flush()  # the libraries' loops read .grad after the backward
    elif count is not None:
        raise ValueError(
            f"backward: got count={count} inside `with sync.micro_batch(count=...) as mb:`, which has one "
            "count for all its backwards: pass the count to sync.micro_batch, or set mb.count"
        )
    else:
        running.backward(loss, **options)
