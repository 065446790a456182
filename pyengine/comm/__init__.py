"""Transports: the few collectives that the engine and its wires may call."""

from __future__ import annotations

import os
import warnings

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
                f"process_group={group}: parameters on {device} are reduced by torch_xla over all replicas, "
                "not by a process group; leave it None"
            )
        from pyengine.comm.xla import Xla

        return Xla(device)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        _check_alone()
        return Local()
    return TorchDist(group, device)


def _check_alone() -> None:
    """Raise RuntimeError, or warn, in one of several processes that a launcher has started: without a process
    group each of them would train a model of its own.

    Only the environment knows: torch's `is_torchelastic_launched` is torchrun's, and true of one process too.
    WORLD_SIZE, which `init_process_group` reads as well, is set where processes train together: by torchrun,
    `accelerate launch`, deepspeed or the user. mpirun and srun also start processes that are to train alone,
    so what they set is a reason to warn.
    """
    launched = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    found = {name: os.environ[name] for name in launched if os.environ.get(name, "").isdecimal()}
    name, size = next(iter(found.items()), ("WORLD_SIZE", "1"))
    if int(size) <= 1:
        return
    text = (
        "call torch.distributed.init_process_group() before the engine is made, or set WORLD_SIZE=1 where "
        f"this process is to train alone: a launcher has started {name}={size} processes, and without a "
        "process group each of them trains a model of its own"
    )
    if name == "WORLD_SIZE":
        raise RuntimeError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=2)
