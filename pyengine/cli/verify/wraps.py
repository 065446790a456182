"""The ways in which `verify` wraps a model: who owns the gradients."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Accumulator, Exact

WRAPS = ("own", "ddp", "fsdp", "hsdp")


def needs(wrap: str, workers: int) -> str:
    """Return why a wrap does not support a number of workers; empty if it does."""
    if wrap == "hsdp" and workers % 2:
        return "2 replicas of shards need an even number of workers"
    return ""


def wrapped(
    wrap: str, model: nn.Module, *, accumulate: int, accumulator: Accumulator | Exact, bucket_cap_mb: float
) -> tuple[Sync, nn.Module]:
    """Return an engine over a model, and the module whose forward to call.

    Args:
        wrap: "own": the engine's buckets; "ddp"; "fsdp": every layer of a ModuleList and the model are
            sharded over all workers; "hsdp": the same, in 2 replicas.
        model: bare; make the optimizer afterwards.
        accumulate, accumulator: as for `pe.attach`.
        bucket_cap_mb: size of the engine's and of DDP's buckets.
    """
    if wrap == "own":
        own = GradSync(model, accumulate=accumulate, accumulator=accumulator, bucket_cap_mb=bucket_cap_mb)
        return own, model
    if wrap == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        return attach(ddp, accumulate=accumulate, accumulator=accumulator), ddp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world, kind = dist.get_world_size(), next(model.parameters()).device.type
    shape = (world,) if wrap == "fsdp" else (2, world // 2)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return attach(model, accumulate=accumulate, accumulator=accumulator), model
