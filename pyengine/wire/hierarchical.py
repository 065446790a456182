"""Sums in two levels: within a host, and of each rank's part across hosts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Hosts, Levels, Work
from pyengine.comm.staged import Staged, rounds_of
from pyengine.ops.codec import Codec
from pyengine.wire.base import Prepares, Wire, is_encoded
from pyengine.wire.bucket_wire import OfBucket, without_memory
from pyengine.wire.cast import BF16, FP16, FP32, as_wire, wire_problems
from pyengine.wire.exchange import (
    AS_IT_IS,
    Exchange,
    HasEncoding,
    Parts,
    exchanges_parts,
)
from pyengine.wire.memory import BucketMemory, BucketPart, KeepsMemory, keeps_residual
from pyengine.wire.payload_memory import PayloadMemory
from pyengine.wire.spelled import Spelled

_log = logging.getLogger("pyengine.wire")


@dataclass(frozen=True, repr=False, kw_only=True)
class Hierarchical(Spelled):
    """Sum within each host, and across hosts only a part a rank: a slow network between hosts carries a
    bucket once a host, not once a rank.

    The ranks of a host send each other a part of the bucket; each adds its part up in float32, sums that
    over the ranks of its place on all hosts, by a wire of their own, and sends the sum round its host.
    Buckets are handed over in float32.

    With L ranks on each of H hosts and Σ|g| the sum over ranks of an element's magnitudes, an element is off
    by at most the error of `intra`'s rounding of each rank's values; (L - 1) 2^-24 Σ|g| of the additions
    within a host; the error of `inter`, as its own documentation has it, for the H sums of hosts; and
    `intra`'s rounding of the result. `FP32()` rounds nothing, so that with it on both levels no element is
    further from the sum than (L + H) 2^-24 Σ|g|. inf and nan cross at their own element.

    Args:
        intra: how a bucket travels within a host: `FP32()`, `BF16()`, `FP16()`, or `Int8()` and `FP8()` that
            round to nearest; or the dtype of one of the first.
        inter: how a part travels across hosts: any wire of one level. What `ErrorFeedback(...)` keeps here is
            what the sum of a host has lost.
        mesh: which ranks are one host: a DeviceMesh of two dimensions, the last of which lies within hosts;
            or rows of ranks, as the default group numbers them. None: ranks of one machine that have one
            network are. Ranks that do not take part in a sum may be in it.

    Raises:
        TypeError, ValueError: a wire that has no place there, or something else for a mesh. Where the engine
            is made, on every rank: a rank that is not in the mesh, or hosts of unequal numbers of ranks.

    Cost: `bytes_on_wire`; memory for two buckets in `intra`'s form, and for 1/L of one as `inter` has it, of
    each bucket. Process groups of each host, and of each place, which later engines use too.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    intra: Wire | torch.dtype = FP32()  # noqa: RUF009 - frozen
    inter: Wire | torch.dtype = FP32()  # noqa: RUF009 - frozen
    mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("intra", "inter"):
            wire = as_wire(getattr(self, name))
            if problems := wire_problems(wire):
                raise TypeError(f"{name}: {problems[0]}")
            object.__setattr__(self, name, wire)
        object.__setattr__(self, "mesh", _rows(self.mesh))
        self._codec()
        if isinstance(self.inter, Prepares):
            raise TypeError(f"inter={self.inter!r}: need a wire of one level, BF16() or Int8() say")

    @property
    def folds_count(self) -> bool:
        return self._wires[0].folds_count or self._wires[1].folds_count

    @property
    def is_encoded(self) -> bool:
        return any(map(is_encoded, self._wires))

    @property
    def keeps_residual(self) -> bool:
        return keeps_residual(self.between_hosts)

    def prepare(self, comm: Comm) -> list[str]:
        try:
            comm.levels(self.mesh)
        except (TypeError, ValueError) as error:
            return [f"wire={self}: {error}"]
        return []

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket."""
        return HierarchicalBucket(self, memory)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        inter = self.between_hosts
        if isinstance(inter, KeepsMemory) and is_encoded(inter):
            raise without_memory(self)
        return self.start(flat, comm, inter, PayloadMemory())

    def start(self, flat: Tensor, comm: Comm, inter: Wire, memory: PayloadMemory) -> Work:
        """Start as `all_reduce_`, with `inter` for this rank's part of a bucket, in the bucket's memory."""
        levels = comm.levels(self.mesh)
        if levels.inside.world_size == 1:
            route, rounds = "one rank a host", _across(flat, levels, inter, memory)
        elif levels.inside.can_share_parts and self._codec() is None:
            route, rounds = "shared memory in the host", _in_shared_memory(flat, levels, inter, memory)
        else:
            route, rounds = "exchanges in the host", self._exchanged(flat, levels, inter, memory)
        _log.debug("sum a bucket of %d elements in two levels: %s", flat.numel(), route)
        inside = 0 if levels.inside.world_size == 1 else 2
        across = 0 if levels.across.world_size == 1 else 2 if exchanges_parts(inter) else 1
        return Staged(rounds, inside + across, flat.device)

    def part_for(self, memory: BucketMemory, numel: int, comm: Comm) -> BucketPart:
        """Return the memory of what this rank sums across hosts, of a bucket's."""
        inside = comm.levels(self.mesh).inside
        bounds = self._parts(numel, inside.world_size).bounds(inside.rank)
        return BucketPart(memory, bounds, index=inside.rank, num_parts=inside.world_size)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return what one rank sends: 2 (L - 1) / L of the bucket as `intra` has it, for whole parts, and
        what `inter` sends for a part among H ranks.

        Raises:
            ValueError: without a mesh it is not known how many ranks a host has.
        """
        if self.mesh is None:
            raise ValueError(
                f"wire={self}: what it sends depends on how many ranks a host has: pass mesh=, or see "
                "StepRecord.bytes_on_wire"
            )
        num_inside = len(self.mesh[0]) if world_size > 1 else 1
        parts = self._parts(numel, num_inside)
        return parts.bytes_sent + self.between_hosts.bytes_on_wire(
            parts.numel_of(0), world_size // num_inside
        )

    @property
    def between_hosts(self) -> Wire:
        """`inter`, as a wire."""
        return self._wires[1]

    @property
    def _wires(self) -> tuple[Wire, Wire]:
        assert not isinstance(self.intra, torch.dtype) and not isinstance(self.inter, torch.dtype)
        return self.intra, self.inter

    def _codec(self) -> Codec | None:
        """Return how values are written within a host; None: as they are."""
        intra = self._wires[0]
        if isinstance(intra, FP32):
            return None
        if isinstance(intra, BF16 | FP16):
            intra = replace(intra, sum="fp32")
        if not isinstance(intra, HasEncoding) or intra.encoding is None or intra.encoding.seed is not None:
            raise ValueError(
                f"intra={intra!r}: need FP32(), BF16(), FP16(), or Int8() or FP8() that round to nearest; "
                "chance and ErrorFeedback have their place in inter"
            )
        return intra.encoding.codec

    def _parts(self, numel: int, num_inside: int) -> Parts:
        return Parts(self._codec() or AS_IT_IS, numel, num_inside)

    def _exchanged(self, flat: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
        """Exchange parts within the host, and sum this rank's across hosts in between."""
        place, inside = levels.inside.rank, levels.inside
        parts = self._parts(flat.numel(), inside.world_size)
        codec, mine = parts.codec, flat[parts.bounds(place)]
        exchange = Exchange(parts, flat.device, memory)
        yield exchange.send_parts(flat, inside)
        codec.sum_(mine, parts.payloads_of(exchange.received, place))
        yield from _across(mine, levels, inter, memory)
        codec.encode_(parts.payload(exchange.sent, place), mine)
        yield from exchange.send_round(flat, inside)


def _across(part: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
    """Sum a part over hosts, in place, in the type of their wire."""
    if levels.across.world_size == 1 or part.numel() == 0:
        return
    if part.dtype == inter.dtype:
        yield from rounds_of(inter.all_reduce_(part, levels.across))
        return
    across = memory.take("across", part.numel() * inter.dtype.itemsize, part.device)
    moved = across.view(inter.dtype).copy_(part)
    yield from rounds_of(inter.all_reduce_(moved, levels.across))
    part.copy_(moved)
    memory.give_back(across=across)


def _in_shared_memory(flat: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
    """Let the host reduce in memory that its ranks share: nothing travels but parts across hosts."""
    inside = levels.inside
    yield inside.all_reduce(flat)
    if levels.across.world_size > 1:  # alike on all ranks of the host
        part = Parts(AS_IT_IS, flat.numel(), inside.world_size).bounds(inside.rank)
        yield from _across(flat[part], levels, inter, memory)
        yield inside.share_part(flat, part)


class HierarchicalBucket(OfBucket["Hierarchical"]):
    """One bucket over a wire of two levels, whose `inter` may keep something of it."""

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        inter = self.wire.between_hosts
        if not isinstance(inter, KeepsMemory):
            return self.wire.start(flat, comm, inter, self.memory.payloads)
        if inter.keeps_residual:
            # All of it, not only at this rank's part, which may have been another one when it was kept.
            flat += self.memory.residual
            self.memory.residual.zero_()
        part = self.wire.part_for(self.memory, flat.numel(), comm)
        return self.wire.start(flat, comm, inter.for_bucket(part), part.payloads)


def _rows(mesh: Any) -> Hosts | None:
    """Return a mesh as rows of ranks."""
    if mesh is None:
        return None
    rows = getattr(mesh, "mesh", mesh)
    rows = rows.tolist() if isinstance(rows, Tensor) else rows
    try:
        found = tuple(tuple(map(int, row)) for row in rows)
    except (TypeError, ValueError):
        found = ()
    if not found or not found[0] or len({len(row) for row in found}) > 1:
        raise TypeError(
            f"mesh={mesh!r}: need a DeviceMesh of two dimensions, the last of which lies within hosts, or "
            "rows of as many ranks each, [[0, 1], [2, 3]] say"
        )
    return found
