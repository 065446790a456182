"""Transports, which run the collectives of the engine and of its communication formats (wires)."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

from pyengine.comm.base import Comm, Local
from pyengine.comm.torch_dist import TorchDist
from pyengine.ops.device import is_lazy

__all__ = ["Comm", "Local", "TorchDist", "comm_for"]


def comm_for(device: torch.device, group: dist.ProcessGroup | None) -> Comm:
    """Return the transport for a device and a process group; a process without a group gets `Local`."""
    if device.type == "meta":
        raise ValueError(
            "parameters are on the meta device, where they have no values: allocate them with "
            "model.to_empty(device=...), load or initialize them, and then create the engine"
        )
    if is_lazy(device):
        if group is not None:
            raise ValueError(
                f"process_group={group}: gradients on {device} are reduced by torch_xla over all replicas, "
                "not by a process group; leave process_group=None"
            )
        from pyengine.comm.xla import Xla

        return Xla(device)
    if group is None and not dist.is_initialized():
        _check_alone()
        return Local()
    return TorchDist(group, device)


def _check_alone() -> None:
    """Raise RuntimeError, or warn, if a launcher has started several processes.

    Without a process group each of these processes would train a separate model. Only the environment shows
    how many processes were launched, because torch's `is_torchelastic_launched` detects only torchrun, and
    returns True even for a single process. torchrun, `accelerate launch`, deepspeed or the user set
    WORLD_SIZE if processes train together, and `init_process_group` reads this variable. mpirun and srun also
    start processes that train separately, so their variables only cause a warning.
    """
    launched = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    found = {name: os.environ[name] for name in launched if os.environ.get(name, "").isdecimal()}
    name, size = next(iter(found.items()), ("WORLD_SIZE", "1"))
    if int(size) <= 1:
        return
    text = (
        "call torch.distributed.init_process_group() before the engine is made, or set WORLD_SIZE=1 if "
        f"this process trains alone: a launcher has started {name}={size} processes, and without a "
        "process group each of them trains a separate model"
    )
    if name == "WORLD_SIZE":
        raise RuntimeError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=2)
