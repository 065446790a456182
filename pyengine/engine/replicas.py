"""Checks that ranks hold replicas, not parameters that are marked as shards or have different values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pyengine.audit.checksum import Part, checksums_on
from pyengine.comm.base import Comm
from pyengine.ops.device import is_lazy

# ---- marks that other packages set ----

# Attributes are compared by name, because importing these packages is slow or fails. In a sharded model,
# replicated parameters lack the attribute or have it set to False.
_OF_SHARDS = {
    "_is_sharded": "torch_xla's or fairscale's FSDP",
    "_fsdp_flattened": "FSDP1 (FullyShardedDataParallel)",
    "_is_flat_param": "FSDP1 (FullyShardedDataParallel)",
    "ds_id": "DeepSpeed ZeRO-3",
    "ds_tensor": "DeepSpeed ZeRO-3",
    "ds_status": "DeepSpeed ZeRO-3",
}
_CLASSES = {
    "FlatParameter": "FSDP1 (FullyShardedDataParallel)",
    "ShardedTensor": "torch.distributed._shard",
    "ShardedTensorBase": "torch.distributed._shard",
}


def shard_problems(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Report the first parameter that another package has sharded over ranks, by its mark or class."""
    for name, param in named:
        marks = [mark for mark in _OF_SHARDS if _is_set(param, mark)]
        classes = [kind.__name__ for kind in type(param).__mro__ if kind.__name__ in _CLASSES]
        if marks or classes:
            by, owner = (marks[0], _OF_SHARDS[marks[0]]) if marks else (classes[0], _CLASSES[classes[0]])
            yield (
                f"params_or_module: give the engine the model before {owner} shards it, or call fully_shard "
                f"(FSDP2) on it and pe.attach(model): parameter {name!r} is a shard ({by}), and every rank "
                "holds a different shard"
            )
            return


def mark_of_part(param: Any) -> str:
    """Return the mark of a parameter whose values may differ between ranks on purpose, or "".

    Megatron-LM sets the mark even in groups of one rank, so marked parameters may still be replicas.
    """
    if getattr(param, "tensor_model_parallel", False) is True:
        return "tensor_model_parallel=True, as Megatron's tensor parallelism marks it"
    if getattr(param, "allreduce", True) is False:
        return "allreduce=False, as Megatron and DeepSpeed mark experts"
    return ""


def _is_set(param: Any, mark: str) -> bool:
    value = getattr(param, mark, None)
    return value is not None and value is not False


# ---- values ----


class Differing(NamedTuple):
    """A tensor whose values differ between the ranks of one group."""

    name: str
    rank: int  # The first rank whose values differ from the values of `root`.
    root: int  # The first rank of the group.


def differing(
    comm: Comm, stored: Mapping[str, Sequence[Tensor]], marks: Mapping[str, str]
) -> tuple[list[Differing], str]:
    """Compare dense tensors by name over the ranks of a transport, all of which must call this.

    Returns the tensors whose values differ, and an error message. The message is set if the ranks do not hold
    replicas: names, shapes or dtypes differ, or values differ in a tensor that is marked as sharded (see
    `mark_of_part`).

    Cost: one read of every element, and a gather of 8 bytes per tensor if any tensor differs.
    """
    if comm.world_size == 1:
        return [], ""
    described = [
        (name, [(list(part.shape), str(part.dtype)) for part in parts]) for name, parts in stored.items()
    ]
    sums = _checksums(part for parts in stored.values() for part in parts)
    gathered = comm.all_gather_object((described, sums, dict(marks)))
    (wanted, *_), ranks = gathered[0], comm.ranks
    for rank, (other, *_) in zip(ranks, gathered, strict=True):
        if other != wanted:
            pairs = zip([*other, None], [*wanted, None], strict=False)
            one, two = next(pair for pair in pairs if pair[0] != pair[1])
            return [], (
                f"build the same model on every rank: rank {rank} has {_shown(one)}, but rank {ranks[0]} has "
                f"{_shown(two)}, among parameters and buffers that would get the values of rank {ranks[0]}"
            )
    names = [name for name, parts in stored.items() for _ in parts]
    found: dict[str, Differing] = {}
    for index, name in enumerate(names):
        all_sums = [sums[index] for _, sums, _ in gathered]
        others = [rank for rank, each in zip(ranks, all_sums, strict=True) if each != all_sums[0]]
        if others:
            found.setdefault(name, Differing(name, others[0], ranks[0]))
    marked = {name: mark for *_, of_rank in gathered for name, mark in of_rank.items()}
    for name in [name for name in found if name in marked]:  # the first name is equal on every rank
        return [], (
            f"give the engine the group of ranks that hold replicas of {name!r}, by process_group= or "
            f"device_mesh= and axes= (docs/mesh.md): ranks {ranks[0]} and {found[name].rank} hold different "
            f"values, and it has {marked[name]}. If they are replicas, load the same values on every rank"
        )
    return [*found.values()], ""


def warn_of_changed(changed: Sequence[Differing]) -> None:
    """Warn, on the first rank of a group, that its values have replaced the values of other ranks."""
    name, rank, root = changed[0]
    more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
    warnings.warn(
        "use the same seed on every rank before you create the model, or load it on every rank, unless all "
        f"ranks should get rank {root}'s values: rank {rank} had different values of {name!r}{more}, which "
        "have been replaced, as DDP does. Ranks that hold different parts of a model (shards, stages, "
        "experts) need the group of the ranks that hold the same part: process_group=, or device_mesh= and "
        "axes= (docs/mesh.md)",
        stacklevel=3,
    )


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    # Compute on the host, because on a lazy device the computation would be an extra program.
    here = [each.detach().cpu() if is_lazy(each.device) else each.detach() for each in tensors]
    found = [0] * len(here)
    for device in dict.fromkeys(each.device for each in here):
        of_device = [index for index, each in enumerate(here) if each.device == device]
        parts = [Part(here[index]) for index in of_device]
        sums = checksums_on(device, sum(part.tensor.numel() for part in parts)).of_all(parts)
        for index, number in zip(of_device, sums.tolist(), strict=True):
            found[index] = number
    return found


def _shown(described: tuple[str, list[tuple[list[int], str]]] | None) -> str:
    if described is None:
        return "nothing more"
    name, parts = described
    return f"{name!r} of " + (", ".join(f"{dtype} {shape}" for shape, dtype in parts) or "no dense tensor")
