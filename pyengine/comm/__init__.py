"""Transports: the few collectives that the engine and its wires may call."""

from __future__ import annotations

import os

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
        _check_alone()
        return Local()
    return TorchDist(group, device)


def _check_alone() -> None:
    """Raise RuntimeError in one of several processes that a launcher has started.

    Launchers say how many there are in WORLD_SIZE, which `init_process_group` reads as well. Without a group
    nothing else does, and every process would train a model of its own.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdecimal() and int(world_size) > 1:
        raise RuntimeError(
            "call torch.distributed.init_process_group() before the engine is made: a launcher has started "
            f"WORLD_SIZE={world_size} processes, and without a process group each of them would train "
            "alone. (Unset WORLD_SIZE where this process is meant to)"
        )
