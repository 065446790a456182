"""Sums in two levels: within each host, then one part for each rank across hosts."""

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
from pyengine.wire.base import Spelled, Wire
from pyengine.wire.bucket_wire import OfBucket, without_memory
from pyengine.wire.cast import BF16, FP16, FP32
from pyengine.wire.exchange import IDENTITY, Exchange, Parts
from pyengine.wire.memory import BucketMemory, BucketPart, PayloadMemory
from pyengine.wire.named import WireLike, as_wire, wire_problems

_log = logging.getLogger("pyengine.wire")


@dataclass(frozen=True, repr=False, kw_only=True)
class Hierarchical(Spelled, Wire):
    """Sum within each host, then only one part for each rank across hosts.

    So a slow network between hosts carries a bucket once for each host, not once for each rank.

    The ranks of a host exchange parts of the bucket. Each rank sums its part in float32, sums the result over
    the ranks with the same index on all hosts, over the wire `inter`, and sends the sum to the ranks of its
    host. The engine passes buckets in float32.

    With L ranks on each of H hosts and Σ|g| the sum over ranks of an element's magnitudes, an element is off
    by at most the error of `intra`'s rounding of each rank's values; (L - 1) 2^-24 Σ|g| of the additions
    within a host; the error of `inter`, as its own documentation has it, for the H sums of hosts; and
    `intra`'s rounding of the result. `FP32()` rounds nothing, so that with it on both levels no element is
    further from the sum than (L + H) 2^-24 Σ|g|. inf and nan cross at their own element.

    Args:
        intra: wire within a host: `FP32()`, `BF16()`, `FP16()`, or `Int8()` and `FP8()` that round to
            nearest; or the name or dtype of one of them.
        inter: wire across hosts: any wire of one level. `ErrorFeedback(...)` keeps the rounding error of the
            host's sum here.
        mesh: ranks by host: a DeviceMesh of two dimensions, the last of which is within hosts; or rows of
            ranks, as the default group numbers them. None: ranks of one machine and one network namespace are
            one host. The mesh may contain ranks that do not take part in a sum.

    Raises:
        TypeError, ValueError: `intra` or `inter` is a wire that cannot be used there, or `mesh` is no mesh.
            When the engine is made, on every rank: a rank is not in the mesh, or hosts have unequal numbers
            of ranks.

    Cost: `bytes_on_wire`; for each bucket, memory for two buckets in the encoding of `intra` and 1/L of one
    in that of `inter`. Process groups of each host and of each index within hosts; later engines reuse them.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    intra: WireLike = FP32()  # noqa: RUF009 - frozen
    inter: WireLike = FP32()  # noqa: RUF009 - frozen
    mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("intra", "inter"):
            wire = as_wire(getattr(self, name))
            if problems := wire_problems(wire):
                raise TypeError(f"{name}: {problems[0]}")
            object.__setattr__(self, name, wire)
        object.__setattr__(self, "mesh", _rows(self.mesh))
        self._codec()
        if self.wires[1].needs_prepare:
            raise TypeError(f"inter={self.inter!r}: need a wire of one level, for example BF16() or Int8()")

    @property
    def folds_count(self) -> bool:
        return self.wires[0].folds_count or self.wires[1].folds_count

    @property
    def is_encoded(self) -> bool:
        return any(wire.is_encoded for wire in self.wires)

    @property
    def keeps_residual(self) -> bool:
        return self.wires[1].keeps_residual

    @property
    def needs_exchange(self) -> bool:
        return True

    def prepare(self, comm: Comm) -> list[str]:
        try:
            comm.levels(self.mesh)
        except (TypeError, ValueError) as error:
            return [f"wire={self}: {error}"]
        return []

    def for_bucket(self, memory: BucketMemory) -> Wire:
        return _HierarchicalBucket(self, memory)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        inter = self.wires[1]
        if inter.is_encoded:
            raise without_memory(self)
        return self.start(flat, comm, inter, PayloadMemory())

    def start(self, flat: Tensor, comm: Comm, inter: Wire, memory: PayloadMemory) -> Work:
        """Launch as `all_reduce_`, with `inter` for the part of this rank."""
        levels = comm.levels(self.mesh)
        if levels.inside.world_size == 1:
            route, rounds = "one rank a host", _across(flat, levels, inter, memory)
        elif levels.inside.can_share_parts and self._codec() is None:
            route, rounds = "shared memory in the host", _in_shared_memory(flat, levels, inter, memory)
        else:
            route, rounds = "exchanges in the host", self._exchanged(flat, levels, inter, memory)
        _log.debug("sum a bucket of %d elements in two levels: %s", flat.numel(), route)
        inside = 0 if levels.inside.world_size == 1 else 2
        across = 0 if levels.across.world_size == 1 else 2 if inter.needs_exchange else 1
        return Staged(rounds, inside + across, flat.device)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the bytes that one rank sends, for whole parts.

        They are 2 (L - 1) / L of the bucket in the encoding of `intra`, and those of `inter` for one part
        among H ranks.

        Raises:
            ValueError: without a mesh the number of ranks on a host is not known.
        """
        if self.mesh is None:
            raise ValueError(
                f"wire={self}: the bytes depend on the number of ranks on a host: pass mesh=, or read "
                "StepRecord.bytes_on_wire"
            )
        num_inside = len(self.mesh[0]) if world_size > 1 else 1
        parts = self.parts(numel, num_inside)
        return parts.bytes_sent + self.wires[1].bytes_on_wire(parts.numel_of(0), world_size // num_inside)

    @property
    def wires(self) -> tuple[Wire, Wire]:
        assert isinstance(self.intra, Wire) and isinstance(self.inter, Wire)
        return self.intra, self.inter

    def _codec(self) -> Codec | None:
        """Return the encoding within a host; None for float32 without one."""
        intra = self.wires[0]
        if isinstance(intra, FP32):
            return None
        if isinstance(intra, BF16 | FP16):
            intra = replace(intra, sum="fp32")
        if intra.encoding is None or intra.encoding.seed is not None:
            raise ValueError(
                f"intra={intra!r}: need FP32(), BF16(), FP16(), or Int8() or FP8() that round to nearest; "
                "stochastic rounding and ErrorFeedback belong to inter"
            )
        return intra.encoding.codec

    def parts(self, numel: int, num_inside: int) -> Parts:
        return Parts(self._codec() or IDENTITY, numel, num_inside)

    def _exchanged(self, flat: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
        """Exchange parts within the host; in between, sum the part of this rank across hosts."""
        index, inside = levels.inside.rank, levels.inside
        parts = self.parts(flat.numel(), inside.world_size)
        codec, mine = parts.codec, flat[parts.bounds(index)]
        exchange = Exchange(parts, flat.device, memory)
        yield exchange.send_parts(flat, inside)
        codec.sum_(mine, parts.payloads_of(exchange.received, index))
        yield from _across(mine, levels, inter, memory)
        codec.encode_(parts.payload(exchange.sent, index), mine)
        yield from exchange.send_round(flat, inside)


def _across(part: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
    """Sum a part over hosts, in place, in the dtype of `inter`."""
    if levels.across.world_size == 1 or part.numel() == 0:
        return
    if part.dtype == inter.dtype:
        yield from rounds_of(inter.all_reduce_(part, levels.across))
        return
    across = memory.allocate("across", part.numel() * inter.dtype.itemsize, part.device)
    cast = across.view(inter.dtype).copy_(part)
    yield from rounds_of(inter.all_reduce_(cast, levels.across))
    part.copy_(cast)
    memory.free(across=across)


def _in_shared_memory(flat: Tensor, levels: Levels, inter: Wire, memory: PayloadMemory) -> Iterator[Work]:
    """Reduce within the host in shared memory: only the parts across hosts are sent."""
    inside = levels.inside
    yield inside.all_reduce(flat)
    if levels.across.world_size > 1:  # the same on all ranks of the host
        part = levels.part_of(flat.numel())
        yield from _across(flat[part], levels, inter, memory)
        yield inside.share_part(flat, part)


class _HierarchicalBucket(OfBucket["Hierarchical"]):
    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        inter = self.wire.wires[1]
        if inter.keeps_residual:
            # The whole residual, not only that of this rank's part: when it was kept, the part may have been
            # another one.
            flat += self.memory.residual
            self.memory.residual.zero_()
        inside = comm.levels(self.wire.mesh).inside
        bounds = self.wire.parts(flat.numel(), inside.world_size).bounds(inside.rank)
        part = BucketPart(self.memory, bounds, index=inside.rank, num_parts=inside.world_size)
        return self.wire.start(flat, comm, inter.for_bucket(part), part.payloads)


def _rows(mesh: Any) -> Hosts | None:
    """Convert a mesh to rows of ranks."""
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
            f"mesh={mesh!r}: need a DeviceMesh of two dimensions, the last of which is within hosts, or "
            "rows of ranks of equal length, for example [[0, 1], [2, 3]]"
        )
    return found
