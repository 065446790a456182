"""The engine of a model that a library has prepared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Settings
from pyengine.step.grad_scaler import GradScaler


def engine_for(model: nn.Module, settings: Settings, scaler: torch.amp.GradScaler | None) -> Sync:
    """Make the engine of a prepared model.

    Args:
        model: what the library has made of it.
        settings: as for `GradSync`.
        scaler: the library's loss scaler; the engine goes on from its state with one of its own,
            `sync.scaler`.
    """
    sync = _unscaled(model, settings)
    sync.scaler = None if scaler is None else _taken_over(scaler)
    return sync


def _unscaled(model: nn.Module, settings: Settings) -> Sync:
    """Attach to a DistributedDataParallel; own the gradients of a bare model,
    which only a single process has.
    """
    options: dict[str, Any] = {
        "accumulate": settings.accumulate,
        "wire": settings.wire,
        "accumulator": settings.accumulator,
        "nonfinite": settings.nonfinite,
    }
    if isinstance(model, DistributedDataParallel):
        return attach(model, **options)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"the prepared model is a {type(model).__name__}: need a DistributedDataParallel (or one "
            "process). Compile the module before it is prepared; sharded models (FSDP, DeepSpeed) reduce "
            "their own gradients"
        )
    return GradSync(model, **options)


def _taken_over(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler for one engine, of the same arguments and state."""
    if type(scaler) not in (torch.amp.GradScaler, GradScaler):
        raise TypeError(
            f"the loss scaler is a {type(scaler).__name__}, whose own ways would be lost: need a "
            "torch.amp.GradScaler, which the engine takes over, or a pyengine.GradScaler"
        )
    ours = GradScaler(scaler._device, enabled=scaler.is_enabled())
    ours.load_state_dict(scaler.state_dict())
    return ours
