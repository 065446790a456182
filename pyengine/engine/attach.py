"""`attach`: an engine that controls the reductions of an existing DDP or FSDP2 model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm import comm_for
from pyengine.comm.axes import Axes, has_group
from pyengine.engine.engine_ranks import EngineRanks, ShardedRanks
from pyengine.engine.handshake import is_replicated, prepare_wire, sparse_modules, unwrapped
from pyengine.engine.make_engine import make_engine
from pyengine.engine.misnamed import explained
from pyengine.engine.sync import Sync
from pyengine.gradients.ddp.reducer import (
    DDPReducer,
    cap_mb_of,
    ignored_parameters,
    problems_of_ddp,
    visible_parameters,
)
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.fsdp.deferral import Defer, Deferral, choose, problems_of_deferral
from pyengine.gradients.fsdp.exact import ExactFSDPReducer
from pyengine.gradients.fsdp.private import is_unit
from pyengine.gradients.fsdp.problems import check_version, managed_parameters, problems_of_fsdp
from pyengine.gradients.fsdp.reducer import FSDPReducer, Managed
from pyengine.gradients.fsdp.units import units_of
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Accumulator, Exact, NonFinite, Settings, as_accumulator
from pyengine.ops.device import is_lazy
from pyengine.wire import FP32
from pyengine.wire.named import WireLike, as_wire


@explained
def attach(
    ddp_model: nn.Module,
    *,
    accumulate: int = 1,
    wire: WireLike = FP32(),  # noqa: B008 - frozen
    accumulator: Accumulator | Exact | torch.dtype = "fp32",
    nonfinite: NonFinite = "skip",
    defer: Defer = "all",
    defer_budget_mb: float | None = None,
    stall_after_s: float | None = 30.0,
    device_mesh: DeviceMesh | None = None,
    axes: Axes = Axes(),  # noqa: B008 - frozen
    shared_memory: bool = False,
) -> Sync:
    """Reduce the gradients of a DDP or FSDP2 model once per window.

    With DDP the gradients are in the engine's own buckets, as in `GradSync`. Until `close`, DDP runs its
    forward and moves inputs, but does not reduce gradients. Over FSDP2 the engine decides when the FSDP2
    units reduce their gradients (docs/sharded.md).

    Args:
        ddp_model: the wrapped model, without a communication hook; or a module to which `fully_shard` or
            `replicate` (from `replicate_with_fsdp`) was applied as a whole, with or without inner units. The
            model may be wrapped by `torch.compile` or by Lightning Fabric's `setup`.
        accumulate, wire, accumulator, nonfinite, stall_after_s, shared_memory: see `GradSync`. Over FSDP2 the
            arguments must match the dtype in which each unit's MixedPrecisionPolicy reduces, except
            accumulator="exact", which ignores the policy. With a narrower wire, gradients are
            reduce-scattered in the wire's dtype and summed in the policy's dtype. `shared_memory` is not
            supported over FSDP2.
        defer: when the units of a sharded model reduce gradients. "all" defers every reduction to the
            window's last backward, and keeps unsharded sums; "outer" (HSDP) reduce-scatters in every
            micro-batch, and all-reduces over replicas once; "none" reduces in every micro-batch. A dict from
            unit names to modes sets the mode of each unit.
        defer_budget_mb: an alternative to `defer`: how much memory, in MiB, a rank may use for unsharded sums
            and for parameters that stay gathered during a window. With `math.inf` each unit gathers and
            reduces once per window.
        device_mesh, axes: the mesh of all ranks, and the meaning of its axes, as for `GradSync`. Needed if
            ranks outside DDP's group share batches with ranks in the group, or hold other pipeline stages
            (docs/mesh.md). DDP's group must be the group of `axes.replicate`. A parameter that DDP ignores,
            for example a parameter of an expert, is reduced over the group whose pattern in `axes.groups`
            matches its name, and is initialized from the first rank of that group. The caller reduces all
            other ignored parameters.

    Returns:
        An engine with the same interface as `GradSync`. Over DDP, buckets have the `bucket_cap_mb` passed to
        DDP, or the default size of `GradSync`. Buffers are broadcast once per window if DDP's
        `broadcast_buffers` is set.

    Raises:
        TypeError: the model is neither wrapped in DDP nor sharded by FSDP2.
        RuntimeError: this torch version's FSDP2 is not supported; 2.11 to 2.15 are.
        ValueError: `axes.groups` names a parameter that DDP reduces; DDP reduces some gradients outside its
            buckets, or has a hook; a unit's policy, mesh or hook is not supported; or a sparse embedding is
            trained over FSDP2. Raised on every rank.

    Cost: see `GradSync`. DDP's own buckets stay allocated although they are unused; they take as much memory
    as one more copy of the gradients.
    """
    ddp_model = unwrapped(ddp_model)
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
        if device_mesh is not None or axes != Axes():
            raise TypeError(
                "device_mesh and axes apply to DDP only, but ddp_model is sharded by FSDP2, which has its "
                "own mesh: leave them out"
            )
        return _attach_sharded(ddp_model, replace(settings, deferral=str(deferral)), deferral)
    if deferral != Deferral():
        raise TypeError(
            f"{deferral}: both arguments apply to FSDP2 only, but ddp_model is a {type(ddp_model).__name__}; "
            "DDP's gradients are always deferred, at no cost"
        )
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(_not_ddp(ddp_model))
    return _attach_ddp(ddp_model, settings, device_mesh, axes)


# ---- DDP ----


def _attach_ddp(
    ddp_model: DistributedDataParallel, settings: Settings, device_mesh: DeviceMesh | None, axes: Axes
) -> Sync:
    """Create the engine of a DDP model; see `attach`."""
    ignored = ignored_parameters(ddp_model)
    own = [(name, param) for name, param in ignored if has_group(name, axes)]
    others = {id(param): param for name, param in ignored if not has_group(name, axes)}
    module = ddp_model.module
    named = [(name, param) for name, param in module.named_parameters() if id(param) not in others]
    params = [param for _, param in named]
    device = params[0].device
    if is_lazy(device):
        raise ValueError(
            f"ddp_model is on {device}: DDP reduces gradients during the backward, which does not work on a "
            "lazily traced device; use pe.GradSync with the unwrapped model"
        )
    settings = replace(settings, bucket_cap_mb=cap_mb_of(ddp_model))
    ranks = EngineRanks(
        named,
        device,
        group=ddp_model.process_group,
        mesh=device_mesh,
        axes=axes,
        shared_memory=settings.shared_memory,
    )
    problems = [*problems_of_ddp(ddp_model)]
    problems += ranks.problems_under_ddp(visible_parameters(ddp_model), ddp_model.process_group)

    def reducer(specs: list[ParamSpec], terms: Terms) -> DDPReducer:
        groups = ranks.groups()
        prepare_wire(settings.wire, groups.comms, ranks.comm)
        ranks.broadcast(own, groups)
        return DDPReducer(ddp_model, specs, params, groups=groups, settings=settings, terms=terms)

    engine = make_engine(named, ranks, settings, reducer, source=module, problems=problems)
    return Sync(engine, ignored=[*others.values()])


# ---- FSDP2 and replicate ----


def _attach_sharded(model: nn.Module, settings: Settings, deferral: Deferral) -> Sync:
    """Create the engine of a model on which `fully_shard` or `replicate` was called; see `attach`.

    Raises:
        RuntimeError: this torch version's FSDP2 is not supported.
        ValueError: a policy, mesh or argument is not supported; raised on every rank.
    """
    check_version(model)
    units = units_of(model)
    for unit in units:
        unit.module.reshard()  # so that the module holds its sharded parameters
    named, ignored = managed_parameters(model, units)
    # Use a separate group, because after an exception in this rank's backward the other ranks still wait for
    # a collective of FSDP2's group.
    comm = comm_for(next(model.parameters()).device, None).with_own_group()

    ranks = ShardedRanks(units, comm)

    def reducer(specs: list[ParamSpec], terms: Terms) -> FSDPReducer | ExactFSDPReducer:
        del specs
        counted = ranks.counted(units)
        choose(units, deferral)
        shares = [counted[id(param)] for _, param in named]
        managed = Managed(model, named, units, shares, comm, settings)
        if settings.kind == "exact":
            return ExactFSDPReducer(managed, terms=terms)
        return FSDPReducer(managed)

    problems = [*problems_of_fsdp(model, settings), *problems_of_deferral(units, deferral, settings)]
    problems += sparse_modules(model, named)
    engine = make_engine(named, ranks, settings, reducer, source=model, problems=problems)
    return Sync(engine, ignored=ignored)


# ---- models that cannot be attached ----


def _not_ddp(model: object) -> str:
    if any("FSDP" in kind.__name__ or "FullyShard" in kind.__name__ for kind in type(model).__mro__):
        return (
            f"ddp_model is a {type(model).__name__}: FSDP1 reduces its gradients by itself, so neither "
            "attach nor GradSync works with it; call fully_shard on the model (FSDP2), or wrap the whole "
            "module in DistributedDataParallel"
        )
    if is_replicated(model):
        return (
            f"ddp_model is a {type(model).__name__}: replicate from torch.distributed._composable hides its "
            "DDP, so attach cannot use it; use DistributedDataParallel, or replicate from "
            "torch.distributed._composable.replicate_with_fsdp"
        )
    return (
        f"ddp_model is a {type(model).__name__}: expected a DistributedDataParallel, or a model to "
        "which fully_shard or replicate was applied as a whole; for an unwrapped model use pe.GradSync"
    )
