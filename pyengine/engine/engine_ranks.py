"""The ranks of an engine, taken from a mesh or process group, and the ranks that sum each gradient."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pyengine.comm import Comm, Local, TorchDist, comm_for
from pyengine.comm.axes import Axes, MeshRanks, as_tuple, axes_problems, process_groups
from pyengine.comm.groups import GroupHandle, group_of
from pyengine.comm.shared_memory import problems_of_sharing, share_memory
from pyengine.engine.replicas import Differing, differing, mark_of_part, warn_of_changed
from pyengine.gradients.fsdp.places import is_counted
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.layout import ParamSpec, first_difference
from pyengine.gradients.local_part import is_dtensor
from pyengine.gradients.own import Groups
from pyengine.gradients.settings import Settings
from pyengine.gradients.slots import local
from pyengine.ops.device import HOST
from pyengine.ops.pointers import keeps_elements_elsewhere
from pyengine.window.header import SharedBatch

Named = Sequence[tuple[str, Parameter]]

# ---- the process groups of one rank ----


@dataclass(frozen=True)
class Membership:
    """The groups of one rank, as sent to other ranks; ranks are numbered within the engine, from 0."""

    described: str  # Description of the mesh and its axes, the same on every rank.
    groups: tuple[Sequence[int], ...]  # The ranks that sum a gradient, indexed by `ParamSpec.group`.
    batch: SharedBatch  # The batch that this rank processes.
    num_batches: int  # The number of batches over all ranks.
    unmatched: tuple[str, ...] = ()  # Patterns of `Axes.groups` that match no parameter of this rank.
    # For each parameter, whether this rank includes it in the norm; None if ranks have the same parameters.
    counted: tuple[bool, ...] | None = None

    @property
    def shared_batch(self) -> SharedBatch | None:
        """The batch that this rank shares with other ranks; None if every rank has a separate batch."""
        return None if self.batch.num_ranks == 1 else self.batch

    @classmethod
    def plain(cls, *, rank: int, world_size: int) -> Membership:
        """Return the membership of a rank that has all parameters and a separate batch."""
        return cls("", (range(world_size),), SharedBatch(rank, 1, True), world_size)


def memberships_differ(memberships: Sequence[Membership], specs: Sequence[Sequence[ParamSpec]]) -> str:
    """Describe contradictions between the memberships or parameters of ranks; empty if they agree."""
    described = [membership.described for membership in memberships]
    if len(set(described)) > 1:
        values = "; ".join(f"rank {rank} has {text or 'no mesh'}" for rank, text in enumerate(described))
        return f"ranks have different meshes or axes: {values}. Pass the same mesh and axes on every rank"
    for pattern in memberships[0].unmatched:
        if all(pattern in membership.unmatched for membership in memberships):
            return (
                f"axes.groups[{pattern!r}] matches no parameter on any rank (the first parameter "
                f"is {specs[0][0].name!r}): a pattern must match the whole name, as in fnmatch"
            )
    members: dict[Sequence[int], dict[int, list[ParamSpec]]] = {}
    in_group: dict[tuple[int, int], list[ParamSpec]] = {}  # ranks with equal specs share a list
    for rank, (membership, mine) in enumerate(zip(memberships, specs, strict=True)):
        for index, ranks in enumerate(membership.groups):
            if (id(mine), index) not in in_group:
                in_group[id(mine), index] = [spec for spec in mine if spec.group == index]
            members.setdefault(ranks, {})[rank] = in_group[id(mine), index]
    return next((text for ranks, have in members.items() if (text := _difference(ranks, have))), "")


def most_parts(memberships: Sequence[Membership]) -> int:
    """Return the largest number of ranks that share a batch within one group.

    Each rank that shares a batch contributes a part of the gradient to the sum.
    """
    groups = {ranks for membership in memberships for ranks in membership.groups}
    return max(max(Counter(memberships[rank].batch.index for rank in ranks).values()) for ranks in groups)


def _difference(ranks: Sequence[int], have: dict[int, list[ParamSpec]]) -> str:
    missing = [rank for rank in ranks if rank not in have]
    if missing:
        first, others = next(iter(have)), ", ".join(map(str, missing))
        return (
            f"rank {first} sums gradients over ranks {list(ranks)}, but the following ranks do not: "
            f"{others}. Pass the same group on every rank of the group"
        )
    difference = first_difference([have[rank] for rank in ranks], ranks)
    if difference is None:
        return ""
    return (
        f"params_or_module differs between ranks: {difference}. Build the same model, in the same order, on "
        "every rank"
    )


# ---- ranks from a process group or a mesh ----


class EngineRanks:
    """The ranks of an engine, and the process groups among them.

    Raises:
        ValueError: this rank is not in the mesh or group. This error may be raised on this rank only.
    """

    def __init__(
        self,
        named: Named,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        axes: Axes = Axes(),  # noqa: B008 - frozen
        shared_memory: bool = False,
    ) -> None:
        self.device, self._shared_memory = device, shared_memory
        self._mesh = MeshRanks(mesh) if isinstance(mesh, DeviceMesh) else None
        # Whether it is known which ranks hold each shard of a DTensor.
        self.takes_dtensors = self._mesh is not None
        if self._mesh is not None:
            group = group_of(self._mesh.all_ranks(), device)
        self.comm = comm_for(device, group)  # connects all ranks of the engine
        self._ranks = self.comm.ranks
        self.membership = Membership.plain(rank=self.comm.rank, world_size=self.comm.world_size)
        # The index of each parameter's group, by parameter name.
        self._group_of = dict.fromkeys((name for name, _ in named), 0)
        # The patterns of `Axes.groups`, each with the index of its group.
        self._patterns: list[tuple[int, str]] = []
        # Problems with the arguments of this rank. If there are any, only `comm` may be used.
        self.problems = list(self._problems(mesh, axes))
        if not self.problems and (self._mesh is not None or axes.groups):
            self._join(named, axes)

    def specs(self, named: Named) -> list[ParamSpec]:
        return [_spec(name, param, self._group_of[name]) for name, param in named]

    def groups(self) -> Groups:
        """Return the transports, and create process groups if needed; every rank calls this after `agree`."""
        if not self.membership.described:
            return Groups(self.comm, [self.for_buckets(self.comm)])
        comms = [self.for_buckets(self._transport(ranks)) for ranks in self.membership.groups]
        by_rank = self.comm.all_gather_object([*self._group_of.items()])
        are_alike = all(other == by_rank[0] for other in by_rank)
        return Groups(self.comm, comms, self.membership.counted, are_alike)

    def for_buckets(self, comm: Comm) -> Comm:
        """Return a transport that sums gradients on the ranks of `comm`; all of these ranks must call this.

        All other data is sent over `comm` itself, in program order.
        """
        # Buckets are launched when they are complete: see [Note: order of collectives in a window] in
        # engine.py.
        comm = comm.with_own_group()
        return share_memory(comm) if self._shared_memory else comm

    def broadcast(self, named: Sequence[tuple[str, Tensor]], groups: Groups) -> None:
        """Copy the tensors of each group's first rank to the other ranks, and warn if tensors differ.

        Also warns about tensors whose values cannot be copied. Raises ValueError, on every rank and before
        any write, if the ranks of a group do not hold replicas: names, shapes or dtypes differ, or the values
        of a parameter that is marked as sharded differ.
        """
        stored = {name: _stored_in(local(tensor)) for name, tensor in named}
        of_group = [
            {name: parts for name, parts in stored.items() if self.group_named(name) == index}
            for index in range(len(groups.comms))
        ]
        marks = {name: mark for name, tensor in named if (mark := mark_of_part(tensor))}
        by_group, problems = list[list[Differing]](), list[str]()
        for comm, tensors in zip(groups.comms, of_group, strict=True):
            found, problem = differing(comm, tensors, marks)
            by_group.append(found)
            problems += [problem] if problem else []
        if self.membership.described:
            problems = [text for texts in self.comm.all_gather_object(problems) for text in texts]
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        for comm, tensors, found in zip(groups.comms, of_group, by_group, strict=True):
            if found:  # equal on all ranks of the group
                comm.broadcast_([part for parts in tensors.values() for part in parts])
                if found[0].root == self._ranks[self.comm.rank]:
                    warn_of_changed(found)
        kept = [(name, tensor) for name, tensor in named if not stored[name]]
        if kept and self.comm.world_size > 1:
            name, tensor = kept[0]
            more = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
            warnings.warn(
                f"load {name!r}{more} with the same values on every rank: the values of {_kind(tensor)} "
                "cannot be copied from rank 0, so every rank keeps its own values",
                stacklevel=2,
            )

    def problems_with(self, named: Named, settings: Settings) -> Iterator[str]:
        yield from self.problems
        if settings.shared_memory is True:
            yield from problems_of_sharing(self.comm, self.device)
        narrow = [name for name, param in named if is_dtensor(param) and param.dtype.itemsize < 4]
        if narrow and settings.kind == "native":
            yield (
                f"parameter {narrow[0]!r} is a DTensor of a narrow dtype, and accumulator='native' would sum "
                "its gradient in that dtype, which autograd cannot do in the engine's buffer: use "
                "accumulator='fp32'"
            )

    def problems_under_ddp(self, named: Named, group: dist.ProcessGroup) -> Iterator[str]:
        """Report why DDP, which uses one group for all parameters, cannot reduce over these ranks."""
        if self.problems or not self.membership.described:
            return
        summed = sorted(dist.get_process_group_ranks(group))
        mine = sorted(self._ranks[rank] for rank in self.membership.groups[0])
        elsewhere = next((name for name, _ in named if self.group_named(name)), None)
        if summed != mine:
            yield (
                f"ddp_model reduces over ranks {summed}, but axes.replicate means ranks {mine}: pass DDP the "
                "group of those axes, for example process_group=mesh['dp'].get_group()"
            )
        elif elsewhere is not None:
            yield (
                f"axes.groups gives {elsewhere!r} a separate group, but DDP sums it over all of DDP's ranks: "
                "make DDP ignore it, by calling "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names) before "
                "DDP is created"
            )
        elif any(is_dtensor(param) for _, param in named):
            yield "ddp_model has DTensor parameters, which its buckets cannot hold: use pe.GradSync"

    def group_named(self, name: str) -> int:
        """Return the index of the group to which the parameter or buffer with this name belongs."""
        return next((index for index, pattern in self._patterns if fnmatchcase(name, pattern)), 0)

    def _problems(self, mesh: Any, axes: Any) -> Iterator[str]:
        if mesh is not None and self._mesh is None:
            yield (
                f"device_mesh is a {type(mesh).__name__}: expected a "
                "torch.distributed.device_mesh.DeviceMesh, for example from init_device_mesh"
            )
        elif not isinstance(axes, Axes):
            yield f"axes is a {type(axes).__name__}: expected a pe.Axes(replicate=...)"
        elif self._mesh is not None:
            yield from _mesh_problems(mesh, self._mesh, axes, self.device)
        elif axes.replicate or axes.shard or axes.count is not None:
            yield f"axes={axes} without device_mesh: only a mesh has axes; pass device_mesh= too"
        elif found := process_groups(axes.groups):
            yield from found
        else:
            for pattern, group in axes.groups.items():
                other = set(dist.get_process_group_ranks(group)) - set(self._ranks)  # type: ignore[arg-type]
                if other:
                    yield (
                        f"axes.groups[{pattern!r}] has rank {min(other)}, which is not in the engine's "
                        "process group: expected a subset of that group"
                    )

    def _join(self, named: Named, axes: Axes) -> None:
        """Determine the membership of this rank and the group of every parameter."""
        mesh, wrong = self._mesh, list[str]()
        batch, num_batches = self.membership.batch, self.membership.num_batches
        group_along: Mapping[str, Any] = axes.groups  # maps each pattern to a process group or to mesh axes
        if mesh is None:
            described, everywhere = _described(axes), self._ranks
            along = {p: tuple(sorted(dist.get_process_group_ranks(g))) for p, g in group_along.items()}
        else:
            described = f"device_mesh {list(mesh.shape.items())}, {_described(axes)}"
            replicate = _replicate(axes, mesh)
            everywhere = mesh.along(replicate)
            along = {pattern: mesh.along(as_tuple(names)) for pattern, names in group_along.items()}
            count = replicate if axes.count is None else as_tuple(axes.count)
            sharing = mesh.along([axis for axis in mesh.shape if axis not in count])
            # The last rank counts the batch, because the last pipeline stage computes the loss.
            batch = SharedBatch(mesh.index(count), len(sharing), sharing[-1] == dist.get_rank())
            num_batches = mesh.size(count)
        groups = list(dict.fromkeys([everywhere, *along.values()]))
        self._patterns = [(groups.index(ranks), pattern) for pattern, ranks in along.items()]
        self._group_of = {name: self.group_named(name) for name, _ in named}
        counted = []
        for name, param in named:
            same = self._held_by(name, param, groups[self._group_of[name]], axes, wrong)
            counted.append(not same or min(same) == dist.get_rank())
        self.problems += wrong[:1]  # report only the first problem, which most DTensors share
        unmatched = [p for p in along if not any(fnmatchcase(name, p) for name, _ in named)]
        holds_parts = len(groups) > 1 or len(everywhere) < len(self._ranks)
        self.membership = Membership(
            described,
            tuple(tuple(map(self._ranks.index, ranks)) for ranks in groups),
            batch,
            num_batches,
            tuple(unmatched),
            tuple(counted) if holds_parts else None,
        )

    def _held_by(
        self, name: str, param: Parameter, summed: tuple[int, ...], axes: Axes, found: list[str]
    ) -> tuple[int, ...]:
        """Return the ranks that hold the same elements of a parameter; append problems to `found`."""
        mesh = self._mesh
        if mesh is None:
            return summed
        replicate, shard = _replicate(axes, mesh), as_tuple(axes.shard)
        mine = {axis for axis in mesh.shape if set(mesh.along([axis])) <= set(summed)}
        same = [axis for axis in mesh.shape if axis in mine or axis not in (*replicate, *shard)]
        if is_dtensor(param):
            dtensor: Any = param
            for dim, placement in enumerate(dtensor.placements):
                axis = mesh.axis_of(dtensor.device_mesh, dim)
                problem = _dtensor_problem(name, axis, placement, summed_over=mine, mesh=mesh)
                if problem:
                    found.append(problem)
                elif placement.is_shard() and axis in same:
                    same.remove(axis)
        return mesh.along(same)

    def _transport(self, ranks: Sequence[int]) -> Comm:
        if len(ranks) == self.comm.world_size:
            return self.comm
        members = sorted(self._ranks[rank] for rank in ranks)
        comm: Comm = Local()
        if len(ranks) > 1:
            assert isinstance(self.comm, TorchDist)
            group, leader = group_of(members, self.device), self.comm.handle
            comm = TorchDist(GroupHandle(group, self.device, leader=leader), self.device)
        comm.join(self.comm)
        return comm


def _replicate(axes: Axes, mesh: MeshRanks) -> tuple[str, ...]:
    return as_tuple(axes.replicate) or (tuple(mesh.shape) if len(mesh.shape) == 1 else ())


def _described(axes: Axes) -> str:
    groups = {
        pattern: as_tuple(names) if isinstance(names, str | tuple | list) else "a process group"
        for pattern, names in axes.groups.items()
    }
    count = None if axes.count is None else as_tuple(axes.count)
    return (
        f"replicate={as_tuple(axes.replicate)}, shard={as_tuple(axes.shard)}, count={count}, groups={groups}"
    )


def _mesh_problems(mesh: DeviceMesh, ranks: MeshRanks, axes: Axes, device: torch.device) -> Iterator[str]:
    if found := axes_problems(axes, ranks.shape):
        yield from found
    elif not _replicate(axes, ranks):
        names = ", ".join(map(repr, ranks.shape))
        yield (
            f"device_mesh has axes {names}, but axes.replicate names none: name the axes along which ranks "
            "have the same parameters and different data, for example axes=pe.Axes(replicate='dp')"
        )
    if mesh.device_type != device.type:
        yield (
            f"device_mesh is on {mesh.device_type}, but the parameters are on {device}: use the same kind of "
            "device"
        )


def _dtensor_problem(
    name: str, axis: str | None, placement: Any, *, summed_over: set[str], mesh: MeshRanks
) -> str:
    if axis is None:
        return (
            f"parameter {name!r} is a DTensor on a mesh with an axis that device_mesh, {dict(mesh.shape)}, "
            "does not have: pass the mesh from which both were sliced"
        )
    if placement.is_partial():
        return f"parameter {name!r} is a DTensor of partial sums ({placement}): expected Shard or Replicate"
    if axis in summed_over and mesh.shape[axis] > 1:
        return (
            f"parameter {name!r} is a DTensor on axis {axis!r}, over which its gradient is to be summed "
            "(axes.replicate): DTensors that are sharded or replicated there reduce their own gradients; "
            "name only axes that the parameter's mesh does not have (with tensor parallelism alone, an axis "
            f"of size 1: a mesh of shape (1, {mesh.shape[axis]})), or use pe.attach for a model under "
            "fully_shard"
        )
    return ""


def _spec(name: str, param: Parameter, group: int) -> ParamSpec:
    part = local(param)
    strides = () if part.is_contiguous() else part.stride()
    stored = "" if param.requires_grad else _described_parts(part)
    return ParamSpec(name, tuple(part.shape), param.dtype, param.requires_grad, strides, group, stored)


def _stored_in(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors that together contain each value of a tensor once; empty if there are none."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [_stored_in(getattr(tensor, name)) for name in names]
        return [each for part in parts for each in part] if all(parts) else []
    if tensor.layout is not torch.strided or tensor.is_quantized or keeps_elements_elsewhere(tensor):
        return []
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # only one element is stored along an expanded dimension
            tensor = tensor.detach().narrow(dim, 0, 1)
    return [tensor]


def _described_parts(tensor: Tensor) -> str:
    """Describe the components of a tensor that is not plain, for comparison between ranks."""
    parts = _stored_in(tensor)
    if len(parts) == 1 and not is_traceable_wrapper_subclass(tensor):
        return ""
    held = ", ".join(f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in parts)
    return f", {_kind(tensor)}{held and f' of {held}'}"


def _kind(tensor: Tensor) -> str:
    """Describe the class or layout of a tensor that is not a plain tensor."""
    if tensor.is_quantized:
        return "a quantized tensor"
    return f"a {type(tensor).__name__}" if tensor.layout is torch.strided else f"a {tensor.layout} tensor"


# ---- ranks of a model sharded by FSDP2 ----


class ShardedRanks:
    """The ranks of an engine for a sharded model.

    A parameter under tensor parallelism is on a mesh of all ranks: the data axes, followed by the axes along
    which ranks share a batch. Other parameters, for example those of normalization layers, are on a mesh that
    has only the data axes; their values are equal on all ranks that share a batch.
    """

    takes_dtensors = True

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.comm = comm  # connects all ranks of the engine
        self.membership = Membership.plain(rank=comm.rank, world_size=comm.world_size)
        meshes = [(unit, param.device_mesh) for unit in units for param in _dtensors_of(unit)]
        cut = [(mesh, unit.data_ndim) for unit, mesh in meshes if mesh.ndim > unit.data_ndim]
        everywhere = torch.arange(comm.world_size, dtype=torch.int64, device=HOST)
        self._is_cut, data = bool(cut), everywhere
        if self._is_cut:
            mesh, data_ndim = cut[0]
            everywhere = mesh.mesh
            # The ranks that differ from this rank only along the data axes; each has a separate batch.
            data = everywhere[(..., *mesh.get_coordinate()[data_ndim:])]
        self._problems = [
            text
            for unit, mesh in dict.fromkeys(meshes)
            for text in _unit_problems(unit, mesh, everywhere if mesh.ndim > unit.data_ndim else data)
        ]
        if self._is_cut and sorted(everywhere.flatten().tolist()) != list(range(comm.world_size)):
            self._problems.append(
                f"ddp_model is on ranks {everywhere.tolist()}: expected all {comm.world_size} ranks"
            )
        if self._is_cut and not self._problems:
            self.membership = _sharing(self.membership, *cut[0])

    def specs(self, named: Named) -> list[ParamSpec]:
        return [ParamSpec.of(name, param) for name, param in named]

    def problems_with(self, named: Named, settings: Settings) -> Iterator[str]:
        del named
        yield from self._problems
        if self._is_cut and settings.kind == "exact":
            yield (
                "accumulator='exact' with tensor parallelism below FSDP: the bits of a micro-batch's "
                "gradient depend on how parameters are sharded, so no sum is the same on every mesh; use "
                "'fp32'"
            )

    def counted(self, units: Sequence[Unit]) -> dict[int, bool]:
        """Return, by the `id` of each parameter, whether this rank includes its elements in the norm.

        Exactly one rank includes each element.
        """
        is_counting = self.membership.batch.is_counting
        return {
            id(param): is_counted(param) and (is_counting or param.device_mesh.ndim > unit.data_ndim)
            for unit in units
            for param in _dtensors_of(unit)
        }


def _dtensors_of(unit: Unit) -> Sequence[Any]:
    return unit.params


def _unit_problems(unit: Unit, mesh: Any, wanted: Tensor) -> Iterator[str]:
    ranks, needed = mesh.mesh.flatten().tolist(), wanted.flatten().tolist()
    if sorted(ranks) != sorted(needed):
        where = f"FSDP unit {unit.name!r}" if unit.name else "ddp_model"
        yield (
            f"{where} is on a mesh of ranks {ranks}: expected a mesh of ranks {needed}, which are all ranks "
            "of the default process group, or under tensor parallelism the ranks with the same part"
        )


def _sharing(plain: Membership, mesh: Any, data_ndim: int) -> Membership:
    """Return the membership of a rank on a mesh: ranks along the axes after the data axes share a batch."""
    ranks = MeshRanks(mesh)
    data, others = [*ranks.shape][:data_ndim], [*ranks.shape][data_ndim:]
    batch = SharedBatch(ranks.index(data), ranks.size(others), ranks.index(others) == 0)
    described = f"a mesh of shape {list(mesh.mesh.shape)}, {data_ndim} axes of which hold data"
    return replace(plain, described=described, batch=batch, num_batches=ranks.size(data))
