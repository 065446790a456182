"""What every adapter is told, and the engine it makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.drop_in import attach
from pyengine.grad_sync import GradSync
from pyengine.norm import GradScaler
from pyengine.sync import Sync
from pyengine.wire import FP32, Wire


@dataclass(frozen=True)
class Settings:
    """An engine to be made once the library has wrapped the model.

    Attributes:
        accumulate, wire, accumulator, nonfinite: as for `GradSync`.
    """

    accumulate: int
    wire: Wire = field(default_factory=FP32)
    accumulator: str = "fp32"
    nonfinite: str = "skip"

    def engine(self, model: nn.Module, *, scaler: torch.amp.GradScaler | None) -> Sync:
        """Make the engine of a prepared model.

        Args:
            model: what the library has made of it.
            scaler: the library's loss scaler; the engine goes on from its state with one of its own, `sync.scaler`.
        """
        sync = self._unscaled(model)
        sync.scaler = None if scaler is None else _taken_over(scaler)
        return sync

    def _unscaled(self, model: nn.Module) -> Sync:
        """Attach to a DistributedDataParallel; own the gradients of a bare model, which only a single process has."""
        options: dict[str, Any] = {
            "wire": self.wire,
            "accumulator": self.accumulator,
            "nonfinite": self.nonfinite,
        }
        if isinstance(model, DistributedDataParallel):
            return attach(model, accumulate=self.accumulate, **options)
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise TypeError(
                f"the prepared model is a {type(model).__name__}: need a DistributedDataParallel (or one process). Compile "
                "the module before it is prepared; sharded models (FSDP, DeepSpeed) reduce their own gradients"
            )
        return GradSync(model, accumulate=self.accumulate, **options)


def _taken_over(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler for one engine, of the same arguments and state."""
    if type(scaler) not in (torch.amp.GradScaler, GradScaler):
        raise TypeError(
            f"the loss scaler is a {type(scaler).__name__}, whose own ways would be lost: need a torch.amp.GradScaler, "
            "which the engine takes over, or a pyengine.GradScaler"
        )
    ours = GradScaler(scaler._device, enabled=scaler.is_enabled())
    ours.load_state_dict(scaler.state_dict())
    return ours
