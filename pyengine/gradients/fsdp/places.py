"""How the parameters of sharded models lie on their meshes: which ranks hold which elements.

The first axes of a mesh are those of the data; axes behind them are of tensor parallelism, whose parts FSDP
shards once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.wire.memory import Place


@dataclass(frozen=True, kw_only=True)
class ScatteredPlace(Place):
    """Where a parameter lies in what a unit scatters: a shard in every rank's part, padded there.

    Its `offset` counts from the start of a part.

    Attributes:
        shape: of the parameter, as forwards on this rank see it.
        dim: along which it is sharded.
        shards: how many parts there are.
        padded: elements of a shard with what pads it.
    """

    shape: tuple[int, ...]
    dim: int
    shards: int
    padded: int

    def read(self, flat: Tensor) -> Tensor:
        whole = flat.new_empty(self.shape)
        for shard, chunk in self._shards(flat, whole):
            chunk.copy_(shard)
        return whole.view(-1)

    def write(self, flat: Tensor, part: Tensor) -> None:
        for shard, chunk in self._shards(flat, part.reshape(self.shape)):
            shard.copy_(chunk)

    def _shards(self, flat: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each shard, in what is scattered and in the whole; the last ones may be short or missing."""
        rows = flat.view(self.shards, -1)[:, self.offset : self.offset + self.padded]
        chunks = whole.chunk(self.shards, self.dim)
        return [
            (row[: chunk.numel()].view(chunk.shape), chunk) for row, chunk in zip(rows, chunks, strict=False)
        ]


def scattered_places(params: Sequence[Any], names: Mapping[int, str], data_ndim: int) -> list[ScatteredPlace]:
    """Return where parameters lie in what their unit scatters, one after the other.

    Args:
        params: that it reduces, sharded.
        names: by a parameter's id: the keys.
        data_ndim: see `Unit`.
    """
    places, offset = [], 0
    for param in params:
        dim = next(place.dim for place in param.placements[:data_ndim] if not place.is_replicate())
        shape, padded = whole_shape(param, data_ndim), padded_numel(param, data_ndim)
        _, shards = replicas_and_shards([param], data_ndim)
        places.append(
            ScatteredPlace(
                names[id(param)],
                offset,
                math.prod(shape),
                shape=tuple(shape),
                dim=dim,
                shards=shards,
                padded=padded,
            )
        )
        offset += padded
    return places


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


def is_first_on_mesh(param: Any) -> bool:
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
