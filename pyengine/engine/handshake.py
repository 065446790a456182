"""Comparison of settings between ranks at construction; any rank's problem raises an error on every rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import pyengine
from pyengine.comm.base import Comm, own_host
from pyengine.engine.engine_ranks import Membership, memberships_differ, most_parts
from pyengine.engine.replicas import shard_problems
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.local_part import is_dtensor
from pyengine.gradients.settings import PARAM_DTYPES, Exact, Settings
from pyengine.ops.exact import MAX_TERMS
from pyengine.window.counter import share
from pyengine.window.verdict import by_rank
from pyengine.wire import Wire


def agree(
    comm: Comm,
    specs: Sequence[ParamSpec],
    settings: Settings,
    problems: Sequence[str],
    membership: Membership | None = None,
) -> WindowSplit:
    """Raise an error on every rank if any rank has a problem or ranks differ.

    Returns how a full window is divided among ranks, and the identity of the engine. With exact sums this
    function also records, in `comm` and its sub-transports, which ranks share a host.
    """
    problems = [*settings.problems(), *problems]
    # These objects are usually equal on all ranks, so the transport sends hashes and gathers only objects
    # that differ. Invalid arguments and wires are not always picklable, so `shared` contains their text.
    sent = None if problems else (settings.accumulate, settings.shared())
    is_plain = membership == Membership.plain(rank=comm.rank, world_size=comm.world_size)
    # Host names differ between ranks, so send them only for exact sums, the only feature that needs them.
    host = own_host() if sent is not None and settings.kind == "exact" else None
    (gathered, places), (engine_id,) = comm.all_gather_objects(
        [(pyengine.__version__, problems, sent, list(specs)), (host, None if is_plain else membership)],
        uuid4().int % 2**62,
    )
    comm.engine_id = engine_id
    versions = [version for version, *_ in gathered]
    if len(set(versions)) > 1:
        which = "; ".join(f"rank {rank} has {version}" for rank, version in enumerate(versions))
        raise ValueError(f"install the same version of pyengine on every rank: {which}")
    raise_problems([texts for _, texts, *_ in gathered])
    specs_of = [specs for *_, specs in gathered]
    world_size = len(gathered)
    members: list[Membership] = [
        member or Membership.plain(rank=rank, world_size=world_size)
        for rank, (_, member) in enumerate(places)
    ]
    if difference := memberships_differ(members, specs_of):
        raise ValueError(difference)
    windows, shared = map(list, zip(*[sent for *_, sent, _ in gathered], strict=True))
    if host is not None:
        comm.host_of = {rank: its_host for rank, (its_host, _) in zip(comm.ranks, places, strict=True)}
    if len(set(shared)) > 1:
        values = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(shared))
        raise ValueError(f"ranks have different settings: {values}. Pass the same settings on every rank")
    batches = [member.batch.index for member in members]
    first_of = {batch: rank for rank, batch in reversed([*enumerate(batches)])}
    first = [first_of[batch] for batch in range(members[0].num_batches)]
    unlike = [r for r, batch in enumerate(batches) if windows[r] != windows[first[batch]]]
    if unlike:
        raise ValueError(
            f"accumulate={windows} by rank, but rank {first[batches[unlike[0]]]} shares its batch with rank "
            f"{unlike[0]}: pass the same accumulate on both ranks"
        )
    if max(windows) - min(windows) > 1 and comm.rank == 0 and not isinstance(settings.accumulator, Exact):
        warnings.warn(
            f"accumulate={windows} by rank: a window ends on each rank after that rank's own number of "
            "micro-batches, and the mean is over all of them; if this is not intended, pass the same "
            "accumulate on every rank",
            stacklevel=5,
        )
    names = [spec.name for spec in specs_of[0]]
    are_alike = all(other is specs_of[0] or [spec.name for spec in other] == names for other in specs_of[1:])
    by_rank, parts = [windows[rank] for rank in first], most_parts(members)
    total = _checked_total(settings, by_rank, parts)
    places = _places(by_rank, total)
    return WindowSplit(places, total, by_rank, engine_id, batches, are_alike, settings.run, parts)


def raise_problems(problems: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if any rank has a problem; `problems` are the gathered problems of each rank."""
    found = "; ".join(problems[0]) if len(problems) == 1 else by_rank(problems)
    if found:
        raise ValueError(found)


def prepare_wire(wire: Wire, comms: Iterable[Comm], world: Comm) -> None:
    """Prepare the transports of a wire; raise ValueError on every rank if this fails on some rank."""
    if wire.needs_prepare:
        problems = [text for comm in comms for text in wire.prepare(comm)]
        raise_problems(world.all_gather_object(problems))


@dataclass(frozen=True)
class WindowSplit:
    """The division of a full window among ranks."""

    # The indices of each rank's micro-batches in the window, by rank; if ranks share batches, by batch.
    places: list[range]
    micro_batches: int  # Number of micro-batches over all ranks; ranks that share a batch count as one.
    by_rank: list[int]  # `accumulate` by rank; by batch if ranks share batches.
    engine_id: int  # 62 random bits that all ranks of this engine share.
    batches: list[int]  # For each rank, the index of its batch in `places` and `by_rank`.
    are_alike: bool  # Whether the parameters have the same names on all ranks.
    slot_size: int  # Number of micro-batches that a rank sums as one term; see `Slots`.
    parts: int  # Number of terms per slot in the sum of a gradient: one from each rank that shares the batch.

    def of(self, rank: int) -> range:
        return self.places[self.batches[rank]]

    @property
    def terms(self) -> int:
        """The number of terms in the sum of a full window, over all ranks."""
        return self.micro_batches // self.slot_size * self.parts

    @property
    def most_terms(self) -> int:
        """The largest number of slots on any rank in a full window."""
        return max(self.by_rank) // self.slot_size


def resized(split: WindowSplit, accumulate: int, *, is_exact: bool) -> WindowSplit:
    """Return the split of a full window in which every rank has `accumulate` micro-batches."""
    if is_exact and set(split.by_rank) == {accumulate}:
        return split
    if is_exact:
        raise ValueError(
            f"gradient_accumulation_steps={accumulate}: accumulator='exact' was made for "
            f"{split.micro_batches} micro-batches per window over all ranks, and its bits depend on this "
            "number; make a new engine"
        )
    by_rank = [accumulate] * len(split.by_rank)
    return replace(split, places=_places(by_rank, sum(by_rank)), micro_batches=sum(by_rank), by_rank=by_rank)


def _checked_total(settings: Settings, by_rank: Sequence[int], parts: int) -> int:
    """Return the number of micro-batches in a full window, over all ranks.

    Raises ValueError if exact sums do not support the resulting number of terms.
    """
    if isinstance(settings.accumulator, Exact):
        total, origin = settings.accumulator.micro_batches, f"accumulator={settings.accumulator}"
        if max(by_rank) > total:
            raise ValueError(
                f"{origin} with accumulate={max(by_rank)}: expected at least as many micro-batches per "
                "window over all ranks as on a single rank"
            )
    else:
        total, origin = sum(by_rank), f"accumulate={by_rank} by rank"
    slots, what = total // settings.run, "micro-batches" if settings.run == 1 else "slots"
    if settings.kind == "exact" and not 1 <= slots * parts <= MAX_TERMS:
        cut = "" if parts == 1 else f" in {parts} parts each, on ranks that share a batch"
        raise ValueError(
            f"{origin} means {slots} {what} per window over all ranks{cut}, but accumulator='exact' supports "
            f"1 to {MAX_TERMS}; use larger micro-batches or shorter windows"
        )
    # Every rank gets the same number of complete slots.
    run, world_size = settings.run, len(by_rank)
    if run > 1 and slots % world_size:
        fits = ", ".join(str(n) for n in range(1, slots + 1) if slots % n == 0)
        raise ValueError(
            f"{origin} on {world_size} ranks with separate batches: each slot is summed on one rank, so the "
            f"number of ranks must divide slots; {slots} slots can be divided among {fits} ranks"
        )
    mine = slots // world_size * run
    if run > 1 and any(accumulate != mine for accumulate in by_rank):
        raise ValueError(
            f"{origin} with accumulate={list(by_rank)} by rank: every rank gets {slots // world_size} whole "
            f"slots of {run} micro-batches, so pass accumulate={mine}, the value of WindowSampler.accumulate"
        )
    return total


def _places(by_rank: Sequence[int], total: int) -> list[range]:
    """Divide micro-batches as `WindowSampler` does if each rank then gets its number in `by_rank`.

    A rank that gets none has 1 there. Otherwise divide micro-batches in rank order.
    """
    world_size = len(by_rank)
    even = [share(total, rank=rank, world_size=world_size) for rank in range(world_size)]
    if [max(1, len(places)) for places in even] == list(by_rank):
        return even
    ends = list(itertools.accumulate(by_rank, initial=0))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def problems_of(
    named: Sequence[tuple[str, nn.Parameter]], settings: Settings, *, takes_shards: bool
) -> Iterator[str]:
    """Report parameters that this engine does not support; `takes_shards` allows DTensors."""
    if not named:
        yield "params_or_module: got no parameters; pass a module or its parameters (a generator only once)"
        return
    trained = [(name, p) for name, p in named if p.requires_grad]
    if not trained:
        yield (
            "pass trainable parameters to params_or_module, or make no engine if nothing is trained: none of "
            f"the {len(named)} parameters requires a gradient"
        )
    devices = sorted({str(p.device) for _, p in named})
    if len(devices) > 1:
        on = ", ".join(devices)
        yield (
            f"params_or_module has parameters on {on}, but an engine supports only one device: make an "
            "engine for each device"
        )
    plain = [(name, p) for name, p in named if not (takes_shards and is_dtensor(p))]
    yield from shard_problems(named)
    yield from _repeated(named)
    yield from _not_plain(plain)
    other = [(name, p.dtype) for name, p in trained if p.dtype not in PARAM_DTYPES]
    if other:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in PARAM_DTYPES)
        yield (
            f"parameter {other[0][0]!r} is {other[0][1]}{_and_more(other)}: expected one of {known}; convert "
            "it or freeze it"
        )
    for name, p in plain:
        if p.requires_grad and p.is_leaf and getattr(p, "grad_dtype", p.dtype) not in (p.dtype, None):
            yield (
                f"parameter {name!r} is {p.dtype} and has grad_dtype={p.grad_dtype}: leave grad_dtype as it "
                "was; accumulator='fp32' sums narrow gradients in float32"
            )
    if not settings.problems() and settings.run > 1:  # other code reports invalid settings
        for name, p in [(name, p) for name, p in trained if p.dtype.itemsize < 4][:1]:
            yield (
                f"accumulator={settings.accumulator}, and parameter {name!r} is {p.dtype}: PyTorch would add "
                f"up the {settings.run} micro-batches of a slot in that dtype; keep float32 parameters, for "
                "example under torch.autocast, or leave slots out"
            )


def problems_of_exact(source: object, settings: Settings) -> Iterator[str]:
    """Report modules that would make exact results depend on the world size."""
    modules = source.named_modules() if isinstance(source, nn.Module) and settings.kind == "exact" else ()
    for name, module in modules:
        if isinstance(module, nn.SyncBatchNorm):
            yield (
                f"{name or 'the module'} is a SyncBatchNorm: with accumulator='exact' a micro-batch's "
                "statistics must not depend on what other ranks compute at the same time. Use BatchNorm or "
                "GroupNorm"
            )


def _repeated(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[str]:
    """Report parameters that appear twice, and parameters that are not leaves."""
    first: dict[int, str] = {}
    for name, param in named:
        if not param.is_leaf:
            why = "it is computed from other tensors and gets no .grad"
            yield f"parameter {name!r} is not a leaf: {why}; pass those tensors instead"
        if first.setdefault(id(param), name) != name:
            yield f"parameter {name!r} is the same as {first[id(param)]!r}: pass each parameter once"


def _not_plain(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[str]:
    """Report trained parameters that are wrapper tensors, and all DTensors, whether trained or frozen.

    Frozen DTensors are included because their shards differ between ranks, and a broadcast would overwrite
    them.
    """
    odd = [
        (name, type(param).__name__)
        for name, param in named
        if is_traceable_wrapper_subclass(param) and (param.requires_grad or is_dtensor(param))
    ]
    if odd:
        yield (
            f"use pe.attach(model) if fully_shard or replicate was called on the model: parameter "
            f"{odd[0][0]!r} is a {odd[0][1]}{_and_more(odd)}, but a GradSync without a mesh needs plain "
            "tensors. Under tensor parallelism give it the mesh of all ranks: pe.GradSync(model, "
            "device_mesh=mesh, axes=pe.Axes(replicate='dp'))"
        )


def _and_more(parameters: Sequence[object]) -> str:
    return f" (and {len(parameters) - 1} more parameters)" if len(parameters) > 1 else ""


_FSDP1 = ("FullyShardedDataParallel", "XlaFullyShardedDataParallel")


def problems_of_source(source: object) -> Iterator[str]:
    """Report wrappers that shard parameters or reduce gradients, in a module given to `GradSync`."""
    modules = list(source.named_modules()) if isinstance(source, nn.Module) else []
    # The names include wrappers of torch_xla and fairscale. Compare class names: importing FSDP is slow.
    kinds = [(name, kind.__name__) for name, module in modules for kind in type(module).__mro__]
    for name, kind in [each for each in kinds if each[1] in _FSDP1][:1]:  # a shard can look like a parameter
        where = f" at {name!r}" if name else ""
        yield (
            f"params_or_module has a {kind}{where}, but FSDP1 works with neither GradSync nor attach: use "
            "fully_shard, then pe.attach(model)"
        )
    for _, module in modules:
        if isinstance(module, DistributedDataParallel | nn.DataParallel) or is_replicated(module):
            unwrap = "pass ddp_model.module, or keep the wrapper and use pe.attach(ddp_model)"
            yield (
                f"params_or_module holds a {type(module).__name__}, which reduces gradients by itself, so "
                "they would be summed twice: "
                f"{'do not call replicate on it' if is_replicated(module) else unwrap}"
            )


def group_problems(process_group: Any, device_mesh: Any) -> Iterator[str]:
    """Report that a group and a mesh were both given, or that `process_group` has the wrong type."""
    is_none = process_group is None or process_group is dist.GroupMember.NON_GROUP_MEMBER
    if process_group is not None and device_mesh is not None:
        why = "each defines the ranks to sum over"
        yield f"process_group and device_mesh were both given, but {why}; pass only one"
    elif not is_none and not isinstance(process_group, dist.ProcessGroup):
        yield (
            f"process_group={process_group!r} is a {type(process_group).__name__}: expected a "
            "torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()), or None for the default "
            "group"
        )


def sparse_modules(model: nn.Module, reduced: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Report modules that produce sparse gradients for parameters that FSDP2 reduces."""
    trained = {id(param) for _, param in reduced if param.requires_grad}
    return [
        f"{name or type(module).__name__} has sparse=True, but sparse gradients do not fit into FSDP2's "
        "buffers. Build it with sparse=False, or use pe.GradSync, which sums sparse gradients densely"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) and id(getattr(module, "weight", None)) in trained
    ]


def unwrapped(source: Any) -> Any:
    """Return the module inside a wrapper of Lightning Fabric's `setup` or of `torch.compile`.

    Return any other `source` unchanged.
    """
    # Compare class names: importing lightning is slow, and it may not be installed.
    if any(kind.__name__ == "_FabricModule" for kind in type(source).__mro__):
        source = source._forward_module  # noqa: SLF001 - `.module` is the model without DDP
    # Search the children, because a wrapper may forward attributes to a compiled module.
    children = dict(source.named_children()) if isinstance(source, nn.Module) else {}
    return children.get("_orig_mod", source)


def is_replicated(module: object) -> bool:
    """Whether `torch.distributed._composable.replicate`, which is based on DDP, was called on a module."""
    name = "torch.distributed._composable.replicate"  # compare names: the import is slow
    return any(kind.__module__ == name for kind in type(module).__mro__)
