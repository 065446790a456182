"""How the parameters of sharded models lie on their meshes: which ranks hold which elements.

The first axes of a mesh are those of the data; axes behind them are of tensor parallelism, whose parts FSDP
shards once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def replicas_and_shards(params: Sequence[Any], data_ndim: int) -> tuple[int, int]:
    """Return how many data ranks hold the same of a unit's parameters, and over how many each is sharded."""
    replicas = shards = 1
    for axis in range(data_ndim if params else 0):
        size = int(params[0].device_mesh.size(axis))
        if params[0].placements[axis].is_replicate():
            replicas *= size
        else:
            shards *= size
    return replicas, shards


def whole_shape(param: Any, data_ndim: int) -> list[int]:
    """Return the shape of what forwards on this rank see of a parameter."""
    shape = list(param.shape)
    coordinate = param.device_mesh.get_coordinate()
    for axis, placement in [*enumerate(param.placements)][data_ndim:]:
        if placement.is_shard():
            size, parts = shape[placement.dim], param.device_mesh.size(axis)
            chunk = -(-size // parts)
            shape[placement.dim] = max(0, min(chunk, size - chunk * coordinate[axis]))
    return shape


def padded_numel(param: Any, data_ndim: int) -> int:
    """Return the elements of a shard as they are scattered: of as many rows on every rank."""
    shape = whole_shape(param, data_ndim)
    _, shards = replicas_and_shards([param], data_ndim)
    for placement in param.placements[:data_ndim]:
        if not placement.is_replicate():
            shape[placement.dim] = -(-shape[placement.dim] // shards)
    return math.prod(shape)


def is_counted(param: Any) -> bool:
    """Whether this rank is the one that counts what it holds of a parameter, of those on its mesh that hold
    the same.
    """
    coordinate = param.device_mesh.get_coordinate()
    return all(
        index == 0
        for index, placement in zip(coordinate, param.placements, strict=True)
        if placement.is_replicate()
    )


def is_first(param: Any) -> bool:
    """Whether this rank is the first on every axis of a parameter's mesh: one of all that it lies on."""
    return not any(param.device_mesh.get_coordinate())


def shard_of(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's shard of a tensor of a parameter's shape: a view where that is contiguous."""
    coordinates = param.device_mesh.get_coordinate()
    for axis, placement in enumerate(param.placements):
        if placement.is_shard():
            chunks = whole.chunk(param.device_mesh.size(axis), placement.dim)
            at = coordinates[axis]
            whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()
