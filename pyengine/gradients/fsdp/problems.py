"""Checks for unsupported sharded models, with a remedy for each problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from pyengine.gradients.fsdp.private import (
    groups_of,
    has_named_dims,
    has_own_reduce_scatter,
    has_reduce_hook,
    is_inner,
    is_offloaded,
    missing,
    reduce_dtype,
)
from pyengine.gradients.fsdp.units import Unit, units_of
from pyengine.gradients.settings import Settings
from pyengine.gradients.slots import local
from pyengine.wire import Wire


def check_version(model: nn.Module) -> None:
    """Raise RuntimeError if the engine does not support FSDP2 of this torch version."""
    lacks = missing(model)
    if lacks:
        raise RuntimeError(
            f"ddp_model is a {type(model).__name__}, but FSDP of torch {torch.__version__} has no "
            f"{lacks[0]}, which the engine needs: use torch 2.11 to 2.15, use "
            "DistributedDataParallel, or train without pyengine"
        )


def managed_parameters(
    model: nn.Module, units: Sequence[Unit]
) -> tuple[list[tuple[str, Parameter]], list[Parameter]]:
    """Return the named parameters that FSDP2 units manage, and the remaining parameters.

    Both lists are in registration order.
    """
    managed = {id(param) for unit in units for param in unit.params}
    named = list(model.named_parameters())
    return (
        [(name, param) for name, param in named if id(param) in managed],
        [param for _, param in named if id(param) not in managed],
    )


def problems_of_fsdp(model: nn.Module, settings: Settings) -> list[str]:
    """Return error messages if a sharded model does not support the given arguments."""
    found = []
    if is_inner(model):
        found.append(
            "ddp_model is part of a larger sharded model: pass the outermost module, whose forward you call"
        )
    if settings.shared_memory is True:
        found.append(
            "shared_memory=True, and ddp_model is sharded by FSDP2, whose units reduce through their own "
            "process groups: leave shared_memory out; for shared memory, use GradSync, or attach to a "
            "DistributedDataParallel"
        )
    for unit in units_of(model):
        where = f"FSDP unit {unit.name!r}" if unit.name else "ddp_model"
        found += [f"{where} {text}" for text in _unit_problems(unit, settings)]
    return found


def _unit_problems(unit: Unit, settings: Settings) -> Iterator[str]:
    module = unit.module
    if len(groups_of(module)) > 1:
        yield (
            "has parameters on several meshes (shard_placement_fn): expected one mesh per unit; call "
            "fully_shard separately on modules of another mesh"
        )
    if is_offloaded(module):
        yield (
            "has a CPUOffloadPolicy, but the engine needs gradients on the model's device: leave "
            "offload_policy out"
        )
    if has_reduce_hook(module):
        yield (
            "has a hook after its reduction (set_all_reduce_hook), but the engine sets this hook itself: for "
            "replicas of shards, pass fully_shard a mesh of two dimensions"
        )
    yield from _sum_problems(unit, settings)
    yield from sorted({text for param in unit.params for text in _placement_problems(param, unit)})


def _sum_problems(unit: Unit, settings: Settings) -> Iterator[str]:
    """Yield messages if the policy of a unit sums in a different dtype than the arguments request."""
    dtype = reduce_dtype(unit.module)
    if dtype is None or settings.problems() or settings.kind == "exact":
        return  # FSDP does not reduce exact sums
    short = str(dtype).removeprefix("torch.")
    if settings.kind == "fp32" and dtype.itemsize < torch.float32.itemsize:
        yield (
            f"sums gradients in {short}, and accumulator='fp32' asks for float32: give fully_shard "
            "mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32), or pass "
            "accumulator='native'"
        )
    elif dtype is torch.float16:
        yield (
            "reduces in float16, in which sums overflow before they are multiplied by 1/count: give its "
            "MixedPrecisionPolicy reduce_dtype=torch.float32"
        )
    elif dtype != settings.wire.dtype or settings.wire.is_encoded or not settings.wire.can_reduce_scatter:
        yield from _wire_problems(unit, dtype, settings.wire)


def _wire_problems(unit: Unit, dtype: torch.dtype, wire: Wire) -> Iterator[str]:
    """Yield the reasons why a unit cannot reduce sums of dtype `dtype` over `wire`."""
    text = f"reduces in {dtype}, but wire={wire}".replace("torch.", "")
    if dtype != wire.dtype and wire.dtype.itemsize >= dtype.itemsize:
        yield (
            f"{text}: expected a wire with the reduce_dtype of its MixedPrecisionPolicy, or a narrower "
            f"wire; pass the wire of that dtype, or reduce_dtype={wire.dtype}"
        )
    elif not wire.can_reduce_scatter:
        yield f"{text}, which has no reduce_scatter: pass the wire of {dtype}"
    elif unit.replicas > 1 and unit.shards == 1:
        yield (
            f"{text}: it has replicas and no shards, and FSDP all-reduces over replicas in its "
            f"reduce_dtype; pass the wire of {dtype}, shard it, or use DistributedDataParallel"
        )
    elif has_own_reduce_scatter(unit.module):
        yield (
            f"{text}: it has a custom reduce-scatter (set_custom_reduce_scatter), which the wire would "
            "replace; leave one of them out"
        )


def _placement_problems(param: Any, unit: Unit) -> Iterator[str]:
    """Yield messages for placements that `fully_shard` and `replicate` do not create."""
    kinds = "".join("R" if placement.is_replicate() else "S" for placement in param.placements)
    wanted = ("R",) if unit.is_replicated else ("S", "RS")
    if has_named_dims(unit.module):
        yield "was given dp_mesh_dims, which no engine supports: pass fully_shard the data-parallel mesh"
    elif kinds[: unit.data_ndim] not in wanted or any(
        placement.is_partial() for placement in param.placements
    ):
        yield (
            f"has parameters placed as {param.placements} on a mesh of {param.device_mesh.ndim} dimensions: "
            "expected the placements of fully_shard or replicate over data-parallel ranks, followed by "
            "shards or replicas of tensor parallelism"
        )
    if type(local(param)) is not torch.Tensor:
        yield f"has shards of type {type(local(param)).__name__}: expected plain tensors"
