"""Which ranks of a sharded model share a batch: those of tensor parallelism below FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.engine.membership import Membership
from pyengine.gradients.fsdp.places import is_counted
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings
from pyengine.ops.device import HOST
from pyengine.window.shared_batch import SharedBatch

Named = Sequence[tuple[str, Parameter]]


class ShardedRanks:
    """The ranks of an engine over a sharded model.

    A parameter under tensor parallelism tells of all of them: its mesh has the axes of the data first, and
    behind them those along which ranks share a batch. Other parameters, of norms say, are on a mesh of the
    data alone, and the same on all ranks that share a batch.

    Args:
        units: of the model.
        comm: transport over all ranks.

    Attributes:
        membership: what this rank says to others.
    """

    takes_dtensors = True

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.membership = Membership.plain(rank=comm.rank, world_size=comm.world_size)
        meshes = [(unit, param.device_mesh) for unit in units for param in _lying(unit)]
        cut = [(mesh, unit.data_ndim) for unit, mesh in meshes if mesh.ndim > unit.data_ndim]
        everywhere = torch.arange(comm.world_size, dtype=torch.int64, device=HOST)
        self._is_cut, data = bool(cut), everywhere
        if self._is_cut:
            everywhere, data = cut[0][0].mesh, _of_data(*cut[0])
        self._problems = [
            text
            for unit, mesh in dict.fromkeys(meshes)
            for text in _mesh_problems(unit, mesh, everywhere if mesh.ndim > unit.data_ndim else data)
        ]
        if self._is_cut and sorted(everywhere.flatten().tolist()) != list(range(comm.world_size)):
            self._problems.append(
                f"ddp_model lies on ranks {everywhere.tolist()}: need all {comm.world_size}"
            )
        if self._is_cut and not self._problems:
            self.membership = _sharing(self.membership, *cut[0])

    def specs(self, named: Named) -> list[ParamSpec]:
        """Describe the parameters, whole."""
        return [ParamSpec.of(name, param) for name, param in named]

    def problems_with(self, named: Named, settings: Settings, *, num_batch_norms: int) -> list[str]:
        """Say what an engine cannot do over these ranks."""
        del named, num_batch_norms
        found = list(self._problems)
        if self._is_cut and settings.kind == "exact":
            found.append(
                "accumulator='exact' with tensor parallelism below FSDP: a micro-batch's own bits depend on "
                "how parameters are cut there, so that no sum has them on every mesh; use 'fp32'"
            )
        return found

    @property
    def shared_batch(self) -> SharedBatch | None:
        """The batch that this rank shares with others; None where every rank has its own."""
        batch = self.membership.batch
        return None if batch.num_ranks == 1 else batch

    def counted(self, units: Sequence[Unit]) -> dict[int, bool]:
        """Return, by a parameter's id, whether this rank counts what it holds of it: over all ranks every
        element once.
        """
        speaks = self.membership.batch.speaks
        return {
            id(param): is_counted(param) and (speaks or param.device_mesh.ndim > unit.data_ndim)
            for unit in units
            for param in _lying(unit)
        }


def _lying(unit: Unit) -> Iterator[Any]:
    yield from unit.params


def _of_data(mesh: Any, data_ndim: int) -> Tensor:
    """Return the ranks that share no batch with one another, this one among them, as a part of a mesh."""
    ranks: Tensor = mesh.mesh[(..., *mesh.get_coordinate()[data_ndim:])]
    return ranks


def _mesh_problems(unit: Unit, mesh: Any, wanted: Tensor) -> list[str]:
    """Say whether a unit lies on other ranks than it should."""
    if sorted(mesh.mesh.flatten().tolist()) == sorted(wanted.flatten().tolist()):
        return []
    where = f"FSDP unit {unit.name!r}" if unit.name else "ddp_model"
    ranks = mesh.mesh.flatten().tolist()
    return [
        (
            f"{where} is on a mesh of ranks {ranks}: need one of {wanted.flatten().tolist()}, which are all "
            "ranks of the default process group, or under tensor parallelism those that have its part"
        )
    ]


def _sharing(plain: Membership, mesh: Any, data_ndim: int) -> Membership:
    """Return the membership of a rank on a mesh whose axes behind those of the data share batches."""
    coordinate, index = mesh.get_coordinate(), 0
    for axis in range(data_ndim):
        index = index * mesh.size(axis) + coordinate[axis]
    sharing = mesh.mesh[tuple(coordinate[:data_ndim])].flatten().tolist()
    batch = SharedBatch(index, len(sharing), not any(coordinate[data_ndim:]))
    described = f"a mesh of shape {list(mesh.mesh.shape)}, {data_ndim} axes of which hold data"
    num_batches = mesh.size() // len(sharing)
    return replace(plain, described=described, batch=batch, num_batches=num_batches)
