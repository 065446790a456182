"""Transports: the few collectives that the engine and its wires may call."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pyengine.comm.base import Comm
from pyengine.comm.local import Local
from pyengine.comm.torch_dist import TorchDist
from pyengine.ops.device import is_lazy

__all__ = ["Comm", "Local", "TorchDist", "comm_for"]


def comm_for(device: torch.device, group: dist.ProcessGroup | None) -> Comm:
    """Pick the transport by where the parameters lie; one process without a process group needs none."""
    if device.type == "meta":
        raise ValueError(
            "parameters lie on the meta device, where they have no values: give them memory first "
            "(model.to_empty(device=...)), load or initialize them, and make the engine then"
        )
    if is_lazy(device):
        if group is not None:
            raise ValueError(
                f"group={group}: parameters on {device} are reduced by torch_xla over all replicas, not by "
                "a process group; leave it None"
            )
        from pyengine.comm.xla import Xla

        return Xla(device)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Local()
    return TorchDist(group, device)
