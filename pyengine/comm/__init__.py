"""Transports: the few collectives that the engine and its wires may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from pyengine.comm.local import Local
from pyengine.comm.torch_dist import TorchDist
from pyengine.host import is_lazy

if TYPE_CHECKING:
    from pyengine.comm.xla import Xla

Transport: TypeAlias = "Local | TorchDist | Xla"

__all__ = ["Local", "TorchDist", "Transport", "comm_for"]


def comm_for(device: torch.device, group: dist.ProcessGroup | None) -> Transport:
    """Pick the transport by where the parameters lie; one process without a process group needs none."""
    if is_lazy(device):
        if group is not None:
            raise ValueError(
                f"group={group}: parameters on {device} are reduced by torch_xla over all replicas, not by a process group; "
                "leave it None"
            )
        from pyengine.comm.xla import Xla

        return Xla(device)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Local()
    return TorchDist(group, device)
