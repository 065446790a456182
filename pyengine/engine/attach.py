"""`attach`: a loop over DDP or FSDP2 as it is, whose reductions the engine drives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm import TorchDist
from pyengine.comm.axes import Axes
from pyengine.engine.attach_sharded import attach_sharded
from pyengine.engine.engine_ranks import EngineRanks
from pyengine.engine.handshake import sparse_modules
from pyengine.engine.make import make_engine
from pyengine.engine.sync import Sync
from pyengine.gradients.accumulator import Exact, as_accumulator
from pyengine.gradients.ddp.hook import HookState
from pyengine.gradients.ddp.private import (
    ignored_parameters,
    outside_buckets,
    problems_of_ddp,
    released_state,
    visible_parameters,
)
from pyengine.gradients.ddp.reducer import DDPReducer
from pyengine.gradients.fsdp.deferral import Defer, Deferral
from pyengine.gradients.fsdp.private import is_unit
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings
from pyengine.ops.device import is_lazy
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
    device_mesh: DeviceMesh | None = None,
    axes: Axes = Axes(),  # noqa: B008 - frozen
) -> Sync:
    """Let DDP's buckets, or FSDP2's units, travel once a window.

    Over DDP it registers the hook and drives no_sync; over FSDP2 it drives the units' own switches
    (docs/sharded.md).

    Args:
        ddp_model: the wrapped model, without another communication hook; or a module that `fully_shard` or
            `replicate` (torch 2.13's) was called on as a whole, units within it included.
        accumulate, wire, accumulator, nonfinite: as for `GradSync`. Narrow parameters with "fp32" get fp32
            sums in addition to DDP's buckets: 4 bytes an element more. Over FSDP2 the units'
            MixedPrecisionPolicy says in which type gradients are summed and sent, and the arguments have to
            say the same; "exact" sums past it.
        defer: of a sharded model, when units reduce: "all" defers every reduction to the window's last
            backward, and holds unsharded sums; "outer" (HSDP) scatters in every micro-batch and sums over
            replicas once; "none" reduces in every micro-batch. Or a dict of these by a unit's name.
        defer_budget_mb: instead, MiB that a rank may hold to communicate less: for gathered parameters, which
            then stay so for a window, and for unsharded sums. `math.inf` has both everywhere: one gather and
            one reduction a window.
        device_mesh, axes: where other ranks share batches with those of DDP's group, or hold other stages:
            the mesh of all of them, and what its axes hold, as for `GradSync` (docs/mesh.md). DDP's group
            has to be that of `axes.replicate`.

    Returns:
        The same loop as `GradSync` gives. Set `.grad` is DDP's own.

    Raises:
        TypeError: neither a DistributedDataParallel nor sharded by FSDP2.
        RuntimeError: this torch's FSDP2 cannot be driven: 2.13 can.
        ValueError: a sparse embedding, which DDP puts into a bucket of its own; a DDP that reduces past its
            buckets, or has a hook; a parameter unfrozen since; a SyncBatchNorm with "exact"; a unit's policy,
            mesh or hook that cannot be driven. Raised on every rank.
    """
    deferral = Deferral(defer, defer_budget_mb)
    settings = Settings(accumulate, as_wire(wire), as_accumulator(accumulator), nonfinite)
    if is_unit(ddp_model):
        if device_mesh is not None or axes != Axes():
            raise TypeError(
                "device_mesh and axes are for a DDP, and ddp_model is sharded by FSDP2, whose units have "
                "their meshes: leave them out"
            )
        return attach_sharded(ddp_model, replace(settings, deferral=str(deferral)), deferral)
    if deferral != Deferral():
        raise TypeError(
            f"{deferral}, and ddp_model is a {type(ddp_model).__name__}: both are for units of FSDP2; DDP's "
            "gradients are always deferred, at no cost"
        )
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(_not_ddp(ddp_model))
    return _attach_ddp(ddp_model, settings, device_mesh, axes)


def _attach_ddp(
    ddp_model: DistributedDataParallel, settings: Settings, device_mesh: DeviceMesh | None, axes: Axes
) -> Sync:
    """Make the engine of a DDP; see `attach`."""
    named = visible_parameters(ddp_model)
    if is_lazy(named[0][1].device):
        raise ValueError(
            f"ddp_model lies on {named[0][1].device}: DDP reduces from inside the backward, which a "
            "recorded program does not have; use pe.GradSync on the bare model"
        )
    state = released_state(ddp_model) or HookState(ddp_model.process_group)
    problems = [*problems_of_ddp(ddp_model), *(sparse_modules(ddp_model) or outside_buckets(ddp_model))]

    ranks = EngineRanks(named, named[0][1].device, group=state.group, mesh=device_mesh, axes=axes)
    problems += ranks.problems_under_ddp(named, ddp_model.process_group)

    def reducer(specs: list[ParamSpec], micro_batches: int) -> DDPReducer:
        del specs  # DDP has laid its buckets out
        state.serve(settings.wire)
        device = named[0][1].device
        if device_mesh is None and isinstance(ranks.comm, TorchDist):
            state.travel_by(ranks.comm, device)
        else:  # DDP's ranks are some of the engine's, or this one alone
            state.comm(device).traffic = ranks.comm.traffic
        counted = ranks.membership.counted
        return DDPReducer(ddp_model, state, settings=settings, terms=micro_batches, counted=counted)

    source = ddp_model.module
    engine = make_engine(named, ranks.comm, settings, reducer, source=source, problems=problems, ranks=ranks)
    return Sync(engine, ignored=ignored_parameters(ddp_model))


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
