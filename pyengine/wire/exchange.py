"""Sums in two exchanges: every rank gets a part of the bucket from all others, adds it up, and sends them the
sum.

So what travels may be anything that a codec decodes, a part's sum is made in float32 in the order of ranks,
and all ranks get the same bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Exchanges, Work
from pyengine.comm.staged import Staged
from pyengine.ops.codec import Codec
from pyengine.wire.base import Prepares, Wire, is_encoded

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

    def new_payload(self, device: torch.device, num: int = 1) -> Tensor:
        """Return memory for so many parts: zeros, since what fills short ones up travels, too."""
        return torch.zeros(num * self.num_bytes, dtype=torch.uint8, device=device)

    def payload(self, rows: Tensor, rank: int) -> Tensor:
        """Return a part's payload, a view of uint8 `[world_size * num_bytes]`."""
        start = rank * self.num_bytes
        return rows[start : start + self.codec.num_bytes(self.numel_of(rank))]

    def payloads_of(self, rows: Tensor, rank: int) -> Tensor:
        """Return what all ranks have sent of one part, uint8 `[world_size, bytes]`, in what they have sent.

        Cost: nothing, or a copy if the part is a short one.
        """
        num_bytes = self.codec.num_bytes(self.numel_of(rank))
        return rows.view(self.world_size, -1)[:, :num_bytes].contiguous()


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
        rows = payloads.view(-1).view(torch.float32).view(payloads.shape[0], out.numel())
        torch.sum(rows, 0, out=out)

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


def exchanges_of(comm: Comm) -> Exchanges:
    """Return a transport as one in which ranks can exchange parts; others were refused when the engine was
    made.
    """
    assert isinstance(comm, Exchanges)
    return comm


def sum_encoded(flat: Tensor, comm: Comm, codec: Codec, rounding: Rounding = TO_NEAREST) -> Work:
    """Start summing a bucket over ranks, in place, as a codec writes it.

    Args:
        flat: float32 `[numel]`, contiguous.
        comm: transport.
        codec: how values travel, and the sum.
        rounding: see there.

    Cost: `Parts.bytes_sent` bytes; 4 bytes read and a code written an element, a code read and written of the
    W received, and a code read and 4 bytes written; memory for two codes an element while it is under way.
    """
    if comm.world_size == 1:
        return Staged(iter(()), 0, flat.device)
    return Staged(_encoded(flat, comm, codec, rounding), _ROUNDS, flat.device)


def _encoded(flat: Tensor, comm: Comm, codec: Codec, rounding: Rounding) -> Iterator[Work]:
    parts, exchanges = Parts(codec, flat.numel(), comm.world_size), exchanges_of(comm)
    received = yield from send_parts(flat, parts, exchanges, rounding)
    mine = parts.bounds(comm.rank)
    own = parts.new_payload(flat.device)
    codec.sum_encode_(
        own[: codec.num_bytes(parts.numel_of(comm.rank))],
        parts.payloads_of(received, comm.rank),
        residual=rounding.residual_of(mine),
        seed=rounding.seeds[1],
        offset=mine.start,
    )
    del received
    yield from send_round(flat, own, parts, exchanges)


def send_parts(
    flat: Tensor, parts: Parts, comm: Exchanges, rounding: Rounding = TO_NEAREST
) -> Generator[Work, None, Tensor]:
    """Encode a bucket and send every rank its part: one round.

    Returns:
        What this rank has got, for `Parts.payloads_of`.
    """
    rows = parts.new_payload(flat.device, comm.world_size)
    for rank in range(comm.world_size):
        bounds = parts.bounds(rank)
        parts.codec.encode_(
            parts.payload(rows, rank),
            flat[bounds],
            residual=rounding.residual_of(bounds),
            seed=rounding.seeds[0],
            offset=bounds.start,
        )
    received = torch.empty_like(rows)
    yield comm.all_to_all(received, rows)
    return received


def send_round(flat: Tensor, own: Tensor, parts: Parts, comm: Exchanges) -> Iterator[Work]:
    """Send all ranks this rank's part, encoded, and decode all parts into the bucket: one round."""
    rows = parts.new_payload(flat.device, comm.world_size)
    yield comm.all_gather(rows, own)
    for rank in range(comm.world_size):
        parts.codec.decode_(flat[parts.bounds(rank)], parts.payload(rows, rank))


def sum_as_it_is(flat: Tensor, comm: Comm, codec: Codec) -> Work:
    """Start summing a bucket that is written already, in place: of the type that the codec writes.

    Args:
        flat: bfloat16 or float16 `[numel]`, contiguous.
        comm: transport.
        codec: of that type, without scales.

    Cost: `Parts.bytes_sent` bytes; W elements read and one written of every W; memory for a copy of the
    bucket and 1/W of it while it is under way, and for another one where W does not divide it.
    """
    if comm.world_size == 1:
        return Staged(iter(()), 0, flat.device)
    return Staged(_as_it_is(flat, comm, codec), _ROUNDS, flat.device)


def _as_it_is(flat: Tensor, comm: Comm, codec: Codec) -> Iterator[Work]:
    parts, exchanges = Parts(codec, flat.numel(), comm.world_size), exchanges_of(comm)
    numel = parts.size * comm.world_size
    rows = flat if numel == flat.numel() else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
    received = torch.empty_like(rows)
    yield exchanges.all_to_all(received, rows)
    own = torch.empty(parts.size, dtype=flat.dtype, device=flat.device)
    codec.sum_encode_(own.view(torch.uint8), received.view(torch.uint8).view(comm.world_size, -1))
    yield exchanges.all_gather(rows, own)
    if rows is not flat:
        flat.copy_(rows[: flat.numel()])


def scatter_sum(out: Tensor, parts: Tensor, comm: Exchanges, encoding: Encoding) -> None:
    """Sum over ranks what an encoding makes of it, and keep this rank's part; see
    `Scatters.reduce_scatter`.
    """
    codec = encoding.codec
    if comm.world_size == 1:
        out.copy_(parts)
        return
    numel = out.numel()
    num_bytes = codec.num_bytes(numel)
    rows = torch.empty(comm.world_size * num_bytes, dtype=torch.uint8, device=parts.device)
    for rank in range(comm.world_size):
        row, part = rows[rank * num_bytes :][:num_bytes], parts[rank * numel :][:numel]
        codec.encode_(row, part, seed=encoding.seed, offset=rank * numel)
    received = torch.empty_like(rows)
    comm.all_to_all(received, rows).wait()
    codec.sum_(out, received.view(comm.world_size, -1))
