"""The layout of sharded parameters on their meshes.

The first axes of a mesh are data-parallel. The remaining axes are tensor-parallel. FSDP shards the
tensor-parallel shards again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.wire.memory import BucketSlice


@dataclass(frozen=True, kw_only=True)
class ScatteredSlice(BucketSlice):
    """The position of a parameter in the input buffer of a unit's reduce-scatter.

    The buffer has one chunk for each rank. Every chunk contains a padded shard of the parameter, at the same
    `offset` from the start of the chunk.
    """

    shape: tuple[int, ...]  # Shape of the parameter in forwards on this rank.
    dim: int  # Dimension along which the parameter is sharded.
    shards: int  # Number of chunks.
    padded: int  # Number of elements of a shard, including its padding.

    def read(self, flat: Tensor) -> Tensor:
        whole = flat.new_empty(self.shape)
        for shard, chunk in self._shards(flat, whole):
            chunk.copy_(shard)
        return whole.view(-1)

    def write(self, flat: Tensor, part: Tensor) -> None:
        for shard, chunk in self._shards(flat, part.reshape(self.shape)):
            shard.copy_(chunk)

    def _shards(self, flat: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return two views of each shard, in `flat` and in `whole`; the last shards may be short."""
        rows = flat.view(self.shards, -1)[:, self.offset : self.offset + self.padded]
        chunks = whole.chunk(self.shards, self.dim)
        return [
            (row[: chunk.numel()].view(chunk.shape), chunk) for row, chunk in zip(rows, chunks, strict=False)
        ]


def scattered_places(params: Sequence[Any], names: Mapping[int, str], data_ndim: int) -> list[ScatteredSlice]:
    """Return the positions of `params`, which a unit reduce-scatters in this order.

    `names` maps the id of each parameter to its name.
    """
    places, offset = [], 0
    for param in params:
        dim = next(place.dim for place in param.placements[:data_ndim] if not place.is_replicate())
        shape = whole_shape(param, data_ndim)
        _, shards = replicas_and_shards([param], data_ndim)
        rows = -(-shape[dim] // shards)  # rows of a padded shard
        padded, numel = math.prod([*shape[:dim], rows, *shape[dim + 1 :]]), math.prod(shape)
        name, whole = names[id(param)], tuple(shape)
        places.append(ScatteredSlice(name, offset, numel, shape=whole, dim=dim, shards=shards, padded=padded))
        offset += padded
    return places


def replicas_and_shards(params: Sequence[Any], data_ndim: int) -> tuple[int, int]:
    replicas = shards = 1
    for axis in range(data_ndim if params else 0):
        size = int(params[0].device_mesh.size(axis))
        if params[0].placements[axis].is_replicate():
            replicas *= size
        else:
            shards *= size
    return replicas, shards


def whole_shape(param: Any, data_ndim: int) -> list[int]:
    """Return the shape of a parameter in forwards on this rank."""
    shape = list(param.shape)
    coordinate = param.device_mesh.get_coordinate()
    for axis, placement in [*enumerate(param.placements)][data_ndim:]:
        if placement.is_shard():
            size, parts = shape[placement.dim], param.device_mesh.size(axis)
            chunk = -(-size // parts)
            shape[placement.dim] = max(0, min(chunk, size - chunk * coordinate[axis]))
    return shape


def is_counted(param: Any) -> bool:
    """Whether this rank includes its shard in the norm; True on the first rank that holds the shard."""
    coordinate = param.device_mesh.get_coordinate()
    return all(
        index == 0
        for index, placement in zip(coordinate, param.placements, strict=True)
        if placement.is_replicate()
    )


def is_first_on_mesh(param: Any) -> bool:
    """Whether this rank has index 0 on every axis of the mesh."""
    return not any(param.device_mesh.get_coordinate())


def shard_of(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's shard of an unsharded tensor, as a view if the shard is contiguous."""
    coordinates = param.device_mesh.get_coordinate()
    for axis, placement in enumerate(param.placements):
        if placement.is_shard():
            chunks = whole.chunk(param.device_mesh.size(axis), placement.dim)
            at = coordinates[axis]
            whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()
