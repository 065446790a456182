"""Transports: the few collectives that the engine and its wires may call."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pyengine.comm.local import Local
from pyengine.comm.torch_dist import TorchDist

__all__ = ["Local", "TorchDist", "comm_for"]


def comm_for(device: torch.device, group: dist.ProcessGroup | None) -> Local | TorchDist:
    """Pick the transport by where the parameters lie; one process without a process group needs none."""
    if device.type == "xla":
        raise ValueError(
            "the parameters lie on an XLA device, for which this version has no transport: move them to cpu or cuda"
        )
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Local()
    return TorchDist(group, device)
