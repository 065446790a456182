"""Sums in two exchanges: every rank gets a part of the bucket from all others, adds it up, and sends them the
sum.

So what travels may be anything that a codec decodes, a part's sum is made in float32 in the order of ranks,
and all ranks get the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.comm.staged import Staged
from pyengine.ops.codec import Codec
from pyengine.wire.base import Prepares, Wire, is_encoded
from pyengine.wire.payload_memory import PayloadMemory

_log = logging.getLogger("pyengine.wire")

_ROUNDS = 2  # an all-to-all and an all-gather


@dataclass(frozen=True)
class Parts:
    """How a bucket is cut: a part a rank, of whole blocks; the last ones may be short or empty.

    Attributes:
        codec: writes the parts.
        numel: of the bucket.
        world_size: how many parts.
    """

    codec: Codec
    numel: int
    world_size: int

    @property
    def size(self) -> int:
        """Elements of a part."""
        block = self.codec.block
        return -(-self.numel // (self.world_size * block)) * block

    @property
    def num_bytes(self) -> int:
        """Bytes that a part takes up on the network."""
        return self.codec.num_bytes(self.size)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in both exchanges."""
        return _ROUNDS * (self.world_size - 1) * self.num_bytes

    def bounds(self, rank: int) -> slice:
        """Return the elements of a rank's part."""
        start = min(rank * self.size, self.numel)
        return slice(start, min(start + self.size, self.numel))

    def numel_of(self, rank: int) -> int:
        """Return how many they are."""
        bounds = self.bounds(rank)
        return int(bounds.stop - bounds.start)

    def place(self, rows: Tensor, rank: int) -> Tensor:
        """Return a part's place, a view of uint8 `[world_size * num_bytes]`: its payload and what fills that
        up.
        """
        return rows[rank * self.num_bytes :][: self.num_bytes]

    def payload(self, rows: Tensor, rank: int) -> Tensor:
        """Return a part's payload, a view of uint8 `[world_size * num_bytes]`."""
        return self.place(rows, rank)[: self.codec.num_bytes(self.numel_of(rank))]

    def payloads_of(self, rows: Tensor, rank: int) -> Tensor:
        """Return what all ranks have sent of one part, uint8 `[world_size, bytes]`, a view of what they have
        sent.
        """
        return rows.view(self.world_size, -1)[:, : self.codec.num_bytes(self.numel_of(rank))]


class _AsItIs(Codec):
    """Float32 elements as they are."""

    def __post_init__(self) -> None:
        assert self.block == 1

    def num_bytes(self, numel: int) -> int:
        return numel * torch.float32.itemsize

    def encode_(
        self,
        payload: Tensor,
        values: Tensor,
        *,
        residual: Tensor | None = None,
        seed: int | None = None,
        offset: int = 0,
    ) -> None:
        del residual, seed, offset  # nothing is lost
        payload.view(torch.float32).copy_(values)

    def sum_(self, out: Tensor, payloads: Tensor) -> None:
        if out.numel() > 0:
            torch.sum(payloads.view(torch.float32), 0, out=out)

    def decode_(self, values: Tensor, payload: Tensor) -> None:
        values.copy_(payload.view(torch.float32))


AS_IT_IS = _AsItIs("float32")


@dataclass(frozen=True)
class Encoding:
    """How values become bytes.

    Attributes:
        codec: writes them.
        seed: of stochastic rounding; None rounds to nearest.
    """

    codec: Codec
    seed: int | None = None


@runtime_checkable
class HasEncoding(Wire, Protocol):
    """A wire that writes values as bytes, which all ranks can read.

    Attributes:
        encoding: how; None where it sums in another way.
    """

    @property
    def encoding(self) -> Encoding | None: ...


def exchanges_parts(wire: Wire) -> bool:
    """Whether a wire of ours needs a transport in which ranks can exchange parts."""
    has_encoding = isinstance(wire, HasEncoding) and wire.encoding is not None
    return has_encoding or is_encoded(wire) or isinstance(wire, Prepares)


@dataclass(frozen=True)
class Rounding:
    """What the encodings of one sum take besides the values.

    Attributes:
        residual: float32 `[numel]`, added and replaced by what is lost; None: that is lost for good.
        seeds: of stochastic rounding, for this rank's values and for the sum of its part; None rounds to
            nearest.
    """

    residual: Tensor | None = None
    seeds: tuple[int | None, int | None] = (None, None)

    def residual_of(self, bounds: slice) -> Tensor | None:
        return None if self.residual is None else self.residual[bounds]


TO_NEAREST = Rounding()


class Exchange:
    """The memory of one sum in two exchanges: what a rank sends, and what it gets.

    Args:
        parts: of the bucket.
        device: where it lies.
        memory: that it is taken from.

    Attributes:
        parts: as given.
        sent, received: uint8 `[world_size * num_bytes]`, a place a part. What fills short parts up is zeros,
            since it travels, too.
    """

    def __init__(self, parts: Parts, device: torch.device, memory: PayloadMemory) -> None:
        self.parts, self._memory = parts, memory
        num_bytes = parts.world_size * parts.num_bytes
        self.sent = memory.take("sent", num_bytes, device)
        self.received = memory.take("received", num_bytes, device)

    def send_parts(self, flat: Tensor, comm: Comm, rounding: Rounding = TO_NEAREST) -> Work:
        """Encode a bucket and start to send every rank its part; behind it `sent` is free."""
        for rank in range(comm.world_size):
            bounds = self.parts.bounds(rank)
            self.parts.codec.encode_(
                self.parts.payload(self.sent, rank),
                flat[bounds],
                residual=rounding.residual_of(bounds),
                seed=rounding.seeds[0],
                offset=bounds.start,
            )
        return comm.all_to_all(self.received, self.sent)

    def send_round(self, flat: Tensor, comm: Comm) -> Iterator[Work]:
        """Send all ranks this rank's part, whose payload has its place in `sent`, decode all parts into the
        bucket, and give the memory back: one round.
        """
        yield comm.all_gather(self.received, self.parts.place(self.sent, comm.rank))
        for rank in range(comm.world_size):
            self.parts.codec.decode_(flat[self.parts.bounds(rank)], self.parts.payload(self.received, rank))
        self._memory.give_back(sent=self.sent, received=self.received)


def sum_encoded(
    flat: Tensor,
    comm: Comm,
    codec: Codec,
    rounding: Rounding = TO_NEAREST,
    *,
    memory: PayloadMemory,
) -> Work:
    """Start summing a bucket over ranks, in place, as a codec writes it.

    Args:
        flat: float32 `[numel]`, contiguous.
        comm: transport.
        codec: how values travel, and the sum.
        rounding: see there.
        memory: of the bucket.

    Cost: `Parts.bytes_sent` bytes; 4 bytes read and a code written an element, a code read and written of the
    W received, and a code read and 4 bytes written; of `memory` two codes an element.
    """
    if comm.world_size == 1:
        return Staged(iter(()), 0, flat.device)
    _log.debug("sum a bucket of %d elements in two exchanges as %s", flat.numel(), codec)
    return Staged(_encoded(flat, comm, codec, rounding, memory), _ROUNDS, flat.device)


def _encoded(
    flat: Tensor, comm: Comm, codec: Codec, rounding: Rounding, memory: PayloadMemory
) -> Iterator[Work]:
    parts = Parts(codec, flat.numel(), comm.world_size)
    exchange = Exchange(parts, flat.device, memory)
    yield exchange.send_parts(flat, comm, rounding)
    mine = parts.bounds(comm.rank)
    codec.sum_encode_(
        parts.payload(exchange.sent, comm.rank),
        parts.payloads_of(exchange.received, comm.rank),
        residual=rounding.residual_of(mine),
        seed=rounding.seeds[1],
        offset=mine.start,
    )
    yield from exchange.send_round(flat, comm)


def sum_as_it_is(flat: Tensor, comm: Comm, codec: Codec, *, memory: PayloadMemory) -> Work:
    """Start summing a bucket that is written already, in place: of the type that the codec writes.

    Args:
        flat: bfloat16 or float16 `[numel]`, contiguous.
        comm: transport.
        codec: of that type, without scales.
        memory: of the bucket.

    Cost: `Parts.bytes_sent` bytes; W elements read and one written of every W; of `memory` a copy of the
    bucket, and another one where W does not divide it.
    """
    if comm.world_size == 1:
        return Staged(iter(()), 0, flat.device)
    _log.debug("sum a bucket of %d elements in two exchanges as %s", flat.numel(), codec)
    return Staged(_as_it_is(flat, comm, codec, memory), _ROUNDS, flat.device)


def _as_it_is(flat: Tensor, comm: Comm, codec: Codec, memory: PayloadMemory) -> Iterator[Work]:
    parts = Parts(codec, flat.numel(), comm.world_size)
    num_bytes, given = comm.world_size * parts.num_bytes, flat.view(torch.uint8)
    received = memory.take("received", num_bytes, flat.device)
    is_whole = num_bytes == given.numel()
    rows = given if is_whole else memory.take("sent", num_bytes, flat.device)
    if not is_whole:
        rows[: given.numel()].copy_(given)
    yield comm.all_to_all(received.view(flat.dtype), rows.view(flat.dtype))
    own = parts.place(rows, comm.rank)  # which has been sent
    codec.sum_encode_(own, received.view(comm.world_size, -1))
    yield comm.all_gather(rows.view(flat.dtype), own.view(flat.dtype))
    memory.give_back(received=received)
    if not is_whole:
        given.copy_(rows[: given.numel()])
        memory.give_back(sent=rows)


def scatter_sum(
    out: Tensor, parts: Tensor, comm: Comm, codec: Codec, rounding: Rounding = TO_NEAREST
) -> None:
    """Sum over ranks what a codec makes of it, and keep this rank's part; see `Scatters.reduce_scatter`.

    Args:
        out, parts, comm: as there.
        codec: how values travel.
        rounding: see there; the sum is not rounded.
    """
    if comm.world_size == 1:
        out.copy_(parts)
        return
    numel = out.numel()
    num_bytes = codec.num_bytes(numel)
    rows = torch.empty(comm.world_size * num_bytes, dtype=torch.uint8, device=parts.device)
    for rank in range(comm.world_size):
        bounds = slice(rank * numel, (rank + 1) * numel)
        codec.encode_(
            rows[rank * num_bytes :][:num_bytes],
            parts[bounds],
            residual=rounding.residual_of(bounds),
            seed=rounding.seeds[0],
            offset=bounds.start,
        )
    received = torch.empty_like(rows)
    comm.all_to_all(received, rows).wait()
    codec.sum_(out, received.view(comm.world_size, -1))
