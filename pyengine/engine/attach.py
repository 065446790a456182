"""`attach`: a loop over DDP or FSDP2 as it is, whose reductions the engine drives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm.axes import Axes
from pyengine.engine.attach_ddp import attach_ddp
from pyengine.engine.attach_sharded import attach_sharded
from pyengine.engine.handshake import without_fabric
from pyengine.engine.sync import Sync
from pyengine.gradients.accumulator import Exact, as_accumulator
from pyengine.gradients.fsdp.deferral import Defer, Deferral
from pyengine.gradients.fsdp.private import is_unit
from pyengine.gradients.settings import Settings
from pyengine.wire import FP32, Wire
from pyengine.wire.cast import as_wire


def attach(
    ddp_model: nn.Module,
    *,
    accumulate: int = 1,
    wire: Wire | torch.dtype = FP32(),  # noqa: B008 - frozen
    accumulator: str | Exact | torch.dtype = "fp32",
    nonfinite: str = "skip",
    defer: Defer = "all",
    defer_budget_mb: float | None = None,
    stall_after_s: float | None = 30.0,
    device_mesh: DeviceMesh | None = None,
    axes: Axes = Axes(),  # noqa: B008 - frozen
    shared_memory: bool = False,
) -> Sync:
    """Let DDP's buckets, or FSDP2's units, travel once a window.

    Over DDP it registers the hook and drives no_sync; over FSDP2 the units' own switches (docs/sharded.md).

    Args:
        ddp_model: the wrapped model, without another communication hook; or a module that `fully_shard` or
            `replicate` (`replicate_with_fsdp`'s) was called on as a whole, units within it included. Either
            may be wrapped by Lightning Fabric's `setup`.
        accumulate, wire, accumulator, nonfinite, stall_after_s: as for `GradSync`. Narrow parameters with
            "fp32" get fp32 sums in addition to DDP's buckets: 4 bytes an element more. Over FSDP2 the
            arguments have to say the type in which the units' MixedPrecisionPolicy sums; "exact" sums past
            it, and a narrower wire scatters in its own type and adds up in the policy's.
        defer: of a sharded model, when units reduce: "all" defers every reduction to the window's last
            backward, and holds unsharded sums; "outer" (HSDP) scatters in every micro-batch and sums over
            replicas once; "none" reduces in every micro-batch. Or a dict of these by a unit's name.
        defer_budget_mb: instead, MiB that a rank may hold for parameters that stay gathered for a window, and
            for unsharded sums. `math.inf` has both everywhere: one gather and one reduction a window.
        device_mesh, axes: where other ranks share batches with those of DDP's group, or hold other stages:
            the mesh of all of them, and what its axes hold, as for `GradSync` (docs/mesh.md). DDP's group
            has to be that of `axes.replicate`. Parameters that DDP was told to ignore, experts say, are
            reduced over the group whose pattern in `axes.groups` names them, with the values of its first
            rank; others are the caller's.
        shared_memory: as for `GradSync`, DDP's buckets being copied through it; refused over FSDP2.

    Returns:
        The same loop as `GradSync` gives. Set `.grad` is DDP's own.

    Raises:
        TypeError: neither DDP nor sharded by FSDP2. RuntimeError: an FSDP2 that cannot be driven; 2.11's can.
        ValueError: `axes.groups` names a parameter that DDP reduces; a sparse embedding, which DDP puts into
            a bucket of its own; a DDP that reduces past its buckets, or has a hook; a parameter unfrozen
            since; a SyncBatchNorm with "exact"; a unit's policy, mesh or hook that cannot be driven. Raised
            on every rank.
    """
    ddp_model = without_fabric(ddp_model)
    deferral = Deferral(defer, defer_budget_mb)
    settings = Settings(
        accumulate,
        as_wire(wire),
        as_accumulator(accumulator),
        nonfinite,
        stall_after_s=stall_after_s,
        shared_memory=shared_memory,
    )
    if is_unit(ddp_model):
        _check_no_mesh(device_mesh, axes)
        return attach_sharded(ddp_model, replace(settings, deferral=str(deferral)), deferral)
    return attach_ddp(_as_ddp(ddp_model, deferral), settings, device_mesh, axes)


def _check_no_mesh(device_mesh: DeviceMesh | None, axes: Axes) -> None:
    if device_mesh is not None or axes != Axes():
        raise TypeError(
            "device_mesh and axes are for a DDP, and ddp_model is sharded by FSDP2, whose units have "
            "their meshes: leave them out"
        )


def _as_ddp(model: nn.Module, deferral: Deferral) -> DistributedDataParallel:
    if deferral != Deferral():
        raise TypeError(
            f"{deferral}, and ddp_model is a {type(model).__name__}: both are for units of FSDP2; DDP's "
            "gradients are always deferred, at no cost"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(_not_ddp(model))
    return model


def _not_ddp(model: object) -> str:
    if any("FSDP" in kind.__name__ or "FullyShard" in kind.__name__ for kind in type(model).__mro__):
        return (
            f"ddp_model is a {type(model).__name__}: FSDP1 reduces its gradients by itself, and neither "
            "attach nor GradSync drives it; call fully_shard on the model (FSDP2), or wrap the whole "
            "module in DistributedDataParallel"
        )
    return (
        f"ddp_model is a {type(model).__name__}: need a DistributedDataParallel, or a model that "
        "fully_shard or replicate was called on as a whole; for a bare model use pe.GradSync"
    )
