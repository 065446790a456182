"""The engine of a model that a library has prepared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.fsdp.deferral import Deferral
from pyengine.gradients.settings import Settings
from pyengine.step.grad_scaler import copy_of


def engine_for(
    model: nn.Module,
    settings: Settings,
    scaler: torch.amp.GradScaler | None,
    deferral: Deferral = Deferral(),  # noqa: B008 - frozen
) -> Sync:
    """Make the engine of a prepared model.

    It attaches to DDP and to FSDP2, and owns the gradients of a bare model, which only a single process has.

    Args:
        model: as the library has prepared it.
        settings: as for `GradSync`.
        scaler: the library's loss scaler. The engine has its own, `sync.scaler`, which starts from this one's
            state.
        deferral: of a sharded model, as for `attach`.

    Raises:
        TypeError: no engine supports this model, or a deferral for a model that is not sharded.
        ValueError: as `attach` and `GradSync`; on every rank.
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
            f"{deferral}, and the prepared model is a {type(model).__name__}: both are for models sharded by "
            "FSDP2; leave them out"
        )
    elif isinstance(model, DistributedDataParallel):
        sync = attach(model, **options)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"the prepared model is a {type(model).__name__}: need a DistributedDataParallel, a model "
            "sharded by FSDP2 (or one process). Compile the module before it is prepared; "
            "FSDP1 and DeepSpeed reduce gradients themselves"
        )
    else:
        sync = GradSync(model, **options)
    sync.scaler = None if scaler is None else copy_of(scaler)
    return sync
