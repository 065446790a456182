"""Find the tensors to audit in a model and its optimizers, and the ranks that share each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm import Comm, comm_for
from pyengine.gradients.slots import local

Groups = Mapping[str, dist.ProcessGroup | None]


@dataclass(frozen=True)
class Shard:
    """The contiguous range of a parameter's elements on this rank."""

    start: int  # Index of the first element.
    numel: int  # Number of elements in the whole parameter.
    copies: int  # Number of ranks with the same elements, among the ranks that sum the gradient.


@dataclass(frozen=True)
class Subject:
    """A tensor on which ranks must agree."""

    name: str
    tensor: Tensor
    replicas: int | None  # Index of the group whose ranks must have the same values, or None.
    summed: int | None  # Index of the group that sums the gradient; None for an unchecked gradient.
    shard: Shard
    kind: str = "parameter"  # or "buffer"

    def gradient(self) -> Tensor | None:
        """Return the reduced gradient of this rank; Megatron keeps it in `main_grad`."""
        found: Any = self.tensor.grad
        if found is None:
            found = getattr(self.tensor, "main_grad", None)
        return None if found is None else local(found)


class Inventory:
    """The audited tensors (subjects) of a model and the transports of their groups, equal on every rank.

    Args:
        model: the model as the loop calls it.
        optimizers: the model's optimizers; parameters that only the optimizers have are audited, too.
        group: group of all ranks; None is the default group.
        groups: maps name patterns to other groups, or to None for tensors that ranks do not have in common.

    Attributes:
        module: the model without its wrappers.
        comms: transports, indexed by `Subject.replicas` and `Subject.summed`.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], *, group: dist.ProcessGroup | None, groups: Groups
    ) -> None:
        self.module, self._ignored = model, set[str]()
        has_own_buffers = True
        while True:  # unwrap DDP and a compiled module
            if isinstance(self.module, DistributedDataParallel):
                group = self.module.process_group if group is None else group
                self._ignored = set(self.module.parameters_to_ignore)
                has_own_buffers = not getattr(self.module, "broadcast_buffers", False)
                self.module = self.module.module
            elif isinstance(inner := getattr(self.module, "_orig_mod", None), nn.Module):
                self.module = inner
            else:
                break
        for pattern, given in groups.items():
            if given is not None and not isinstance(given, dist.ProcessGroup):
                raise TypeError(
                    f"groups[{pattern!r}]={given!r} is a {type(given).__name__}; expected a "
                    "torch.distributed.ProcessGroup, or None for tensors that ranks do not have in common"
                )
        self._group, self._groups, self._device = group, groups, next(model.parameters()).device
        self.comms: list[Comm] = [comm_for(self._device, group)]
        self._known: dict[int, int] = {}
        self.subjects = [*self._parameters(), *self._optimizers_own(optimizers)]
        if has_own_buffers:
            self.subjects += buffers_of(self.module, self._index_of)
        self._check_alike()
        # The checks use separate groups, because a rank that skips a step continues with the loop's
        # collectives while the other ranks run the check.
        self.comms = [comm.with_own_group() for comm in self.comms]

    def _parameters(self) -> Iterator[Subject]:
        for name, param in self.module.named_parameters():
            index = self._index_of(name)
            if index is None or name in self._ignored:
                continue
            if hasattr(param, "to_local"):
                yield self._sharded(name, param)
            else:
                shard = Shard(0, param.numel(), self.comms[index].world_size)
                yield Subject(name, param, index, index if param.requires_grad else None, shard)

    def _optimizers_own(self, optimizers: Sequence[Any]) -> Iterator[Subject]:
        known = {id(param) for param in self.module.parameters()}
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        for place, param in enumerate(params):
            name = f"optimizer.{place}"
            if id(param) not in known and (index := self._index_of(name)) is not None:
                yield Subject(name, param, index, None, Shard(0, param.numel(), 1))

    def _sharded(self, name: str, param: Any) -> Subject:
        """Describe an FSDP2 DTensor, whose mesh determines which rank holds which shard."""
        mesh, placements = param.device_mesh, param.placements
        all_ranks = sorted(mesh.mesh.flatten().tolist())
        ranks = sorted(dist.get_process_group_ranks(self._group)) if dist.is_initialized() else [0]
        whole = 0 if all_ranks == ranks else None
        replicas, copies = None, 1
        for axis, placement in enumerate(placements):
            if placement.is_replicate() and mesh.size(axis) > 1:
                copies *= mesh.size(axis)
                replicas = self._add(mesh.get_group(axis))
        start = _start_of(param)
        is_probed = start is not None and param.requires_grad
        return Subject(
            name, param, replicas, whole if is_probed else None, Shard(start or 0, param.numel(), copies)
        )

    def _index_of(self, name: str) -> int | None:
        """Return the group index for a name, or None if ranks do not have the tensor in common."""
        for pattern, group in self._groups.items():
            if fnmatchcase(name, pattern):
                return None if group is None else self._add(group)
        return 0

    def _add(self, group: dist.ProcessGroup) -> int:
        if id(group) not in self._known:
            self._known[id(group)] = len(self.comms)
            self.comms.append(comm_for(self._device, group))
        return self._known[id(group)]

    def _check_alike(self) -> None:
        mine = [
            (s.name, list(s.tensor.shape), str(s.tensor.dtype), s.replicas, s.summed) for s in self.subjects
        ]
        gathered = self.comms[0].all_gather_object(mine)
        if not self.subjects:
            raise ValueError("model has no parameter that ranks have in common: there is nothing to audit")
        for rank, other in enumerate(gathered):
            if other != gathered[0]:
                rows = zip([*gathered[0], None], [*other, None], strict=False)
                here, there = next((a, b) for a, b in rows if a != b)
                raise ValueError(
                    f"model differs between ranks: rank 0 has {_said(here)}, rank {rank} has {_said(there)}. "
                    "Audit the same model and optimizer on every rank of the group; use "
                    "groups={pattern: None} to exclude tensors that ranks do not have in common"
                )


def buffers_of(module: nn.Module, index_of: Callable[[str], int | None]) -> list[Subject]:
    """Return the buffers that must be equal on all ranks; `index_of` returns the group index of a name."""
    device, found = next(module.parameters()).device, []
    for prefix, part in module.named_modules():
        is_local = isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
        for name, buffer in [] if is_local else part.named_buffers(prefix, recurse=False):
            index = index_of(name)
            if index is not None and buffer.device == device:
                found.append(Subject(name, buffer, index, None, Shard(0, buffer.numel(), 1), "buffer"))
    return found


def _said(row: Any) -> str:
    return "no further tensor" if row is None else f"{row[0]!r} {row[2]} {row[1]}"


def _start_of(param: Any) -> int | None:
    """Return the index of a DTensor's first local element, or None if its shard is not contiguous."""
    start, rows = 0, param.shape[0] if param.dim() else 1
    shards = [(axis, p) for axis, p in enumerate(param.placements) if not p.is_replicate()]
    if not shards:
        return 0
    if len(shards) > 1 or not shards[0][1].is_shard(0):
        return None
    axis = shards[0][0]
    size, at = param.device_mesh.size(axis), param.device_mesh.get_local_rank(axis)
    start = min(rows, -(-rows // size) * at)
    held: Tensor = local(param)
    return start * (param.numel() // rows if rows else 0) if held.is_contiguous() else None
