"""Who owns the gradients of a run: the ways in which `verify` wraps a model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Exact

WRAPS = ("own", "ddp", "fsdp", "hsdp")


def needs(wrap: str, workers: int) -> str:
    """Say why a number of workers cannot be wrapped so; empty if it can."""
    if wrap == "hsdp" and workers % 2:
        return "2 replicas of shards need an even number of workers"
    return ""


def wrapped(
    wrap: str, model: nn.Module, *, accumulate: int, accumulator: str | Exact, bucket_cap_mb: float
) -> tuple[Sync, nn.Module]:
    """Return an engine over a model, and what to call for a forward.

    Args:
        wrap: "own": buckets of the engine's; "ddp"; "fsdp": every layer of a ModuleList is sharded over all
            workers, and the model; "hsdp": the same, as 2 replicas.
        model: bare; an optimizer is made over its parameters afterwards.
        accumulate, accumulator: as for `pe.attach`.
        bucket_cap_mb: of own and of DDP's buckets.
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
