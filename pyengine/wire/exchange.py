"""Sums in two exchanges: an all-to-all, after which every rank sums one part, and an all-gather of the sums.

With two exchanges, values may be sent in any encoding, each part is summed in float32 in rank order, and all
ranks get the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.comm.staged import Staged
from pyengine.ops.codec import Codec
from pyengine.wire.memory import PayloadMemory

_log = logging.getLogger("pyengine.wire")

_ROUNDS = 2  # an all-to-all and an all-gather


@dataclass(frozen=True)
class Parts:
    """The split of a bucket into parts of whole blocks, one per rank; the last ones may be empty."""

    codec: Codec
    numel: int  # number of elements in the bucket
    world_size: int

    @property
    def size(self) -> int:
        """Number of elements in a part."""
        block = self.codec.block
        return -(-self.numel // (self.world_size * block)) * block

    @property
    def num_bytes(self) -> int:
        """Number of bytes in an encoded part."""
        return self.codec.num_bytes(self.size)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that one rank sends in both exchanges."""
        return _ROUNDS * (self.world_size - 1) * self.num_bytes

    def bounds(self, rank: int) -> slice:
        start = min(rank * self.size, self.numel)
        return slice(start, min(start + self.size, self.numel))

    def numel_of(self, rank: int) -> int:
        bounds = self.bounds(rank)
        return int(bounds.stop - bounds.start)

    # The methods below return views of `rows`, a buffer of payloads: uint8 `[world_size * num_bytes]`.

    def padded_payload(self, rows: Tensor, rank: int) -> Tensor:
        return rows[rank * self.num_bytes :][: self.num_bytes]

    def payload(self, rows: Tensor, rank: int) -> Tensor:
        return self.padded_payload(rows, rank)[: self.codec.num_bytes(self.numel_of(rank))]

    def payloads_of(self, rows: Tensor, rank: int) -> Tensor:
        """Return the payloads of one part from all ranks, as uint8 `[world_size, bytes]`."""
        return rows.view(self.world_size, -1)[:, : self.codec.num_bytes(self.numel_of(rank))]


@dataclass(frozen=True)
class Rounding:
    """The rounding of values in one sum."""

    # float32 `[numel]`, added to the values and overwritten with the rounding error. If None, the error is
    # discarded.
    residual: Tensor | None = None
    # The seeds of stochastic rounding, for the values of this rank and for the sum of its part. If a seed is
    # None, rounding is to nearest.
    seeds: tuple[int | None, int | None] = (None, None)

    def residual_of(self, bounds: slice) -> Tensor | None:
        return None if self.residual is None else self.residual[bounds]

    def encode_(self, codec: Codec, payload: Tensor, flat: Tensor, bounds: slice) -> None:
        """Encode a part of this rank's values."""
        residual, seed = self.residual_of(bounds), self.seeds[0]
        codec.encode_(payload, flat[bounds], residual=residual, seed=seed, offset=bounds.start)


TO_NEAREST = Rounding()


class Exchange:
    """The buffers of one sum in two exchanges."""

    def __init__(self, parts: Parts, device: torch.device, memory: PayloadMemory) -> None:
        self.parts, self._memory = parts, memory
        num_bytes = parts.world_size * parts.num_bytes
        # One payload per part. Short parts are padded with zeros, because the padding is also sent.
        self.sent = memory.allocate("sent", num_bytes, device)
        self.received = memory.allocate("received", num_bytes, device)

    def send_parts(self, flat: Tensor, comm: Comm, rounding: Rounding = TO_NEAREST) -> Work:
        """Encode a bucket and launch the all-to-all; when it has completed, `sent` may be reused."""
        parts = self.parts
        for rank in range(comm.world_size):
            rounding.encode_(parts.codec, parts.payload(self.sent, rank), flat, parts.bounds(rank))
        return comm.all_to_all(self.received, self.sent)

    def send_round(self, flat: Tensor, comm: Comm) -> Iterator[Work]:
        """All-gather this rank's payload in `sent`, decode all parts into `flat`, and free the buffers."""
        yield comm.all_gather(self.received, self.parts.padded_payload(self.sent, comm.rank))
        for rank in range(comm.world_size):
            self.parts.codec.decode_(flat[self.parts.bounds(rank)], self.parts.payload(self.received, rank))
        self._memory.free(sent=self.sent, received=self.received)


def sum_encoded(
    flat: Tensor,
    comm: Comm,
    codec: Codec,
    rounding: Rounding = TO_NEAREST,
    *,
    memory: PayloadMemory,
) -> Work:
    """Launch the sum of a bucket over all ranks, in place, with values encoded by a codec.

    Args:
        flat: contiguous bucket, `[numel]`: float32, or bfloat16 or float16 with a codec of this dtype.
        rounding: rounding of float32 values and of their sum.

    Cost: each rank sends `Parts.bytes_sent` bytes. For a float32 bucket, encoding reads 4 bytes and writes a
    code per element; the sum reads W codes and writes one code for every W elements; decoding reads a code
    and writes 4 bytes per element. `memory` holds two codes per element. A bf16 or fp16 bucket is sent
    unchanged: the sum reads W elements and writes one element for every W elements. `memory` then holds a
    copy of the bucket, and a second copy if `numel` is not a multiple of W.
    """
    if comm.world_size == 1:
        return Staged(iter(()), 0, flat.device)
    _log.debug("sum a bucket of %d elements in two exchanges as %s", flat.numel(), codec)
    parts, is_wide = Parts(codec, flat.numel(), comm.world_size), flat.dtype == torch.float32
    rounds = _encoded(flat, comm, parts, rounding, memory) if is_wide else _narrow(flat, comm, parts, memory)
    return Staged(rounds, _ROUNDS, flat.device)


def _encoded(
    flat: Tensor, comm: Comm, parts: Parts, rounding: Rounding, memory: PayloadMemory
) -> Iterator[Work]:
    exchange = Exchange(parts, flat.device, memory)
    yield exchange.send_parts(flat, comm, rounding)
    mine = parts.bounds(comm.rank)
    parts.codec.sum_encode_(
        parts.payload(exchange.sent, comm.rank),
        parts.payloads_of(exchange.received, comm.rank),
        parts.numel_of(comm.rank),
        residual=rounding.residual_of(mine),
        seed=rounding.seeds[1],
        offset=mine.start,
    )
    yield from exchange.send_round(flat, comm)


def _narrow(flat: Tensor, comm: Comm, parts: Parts, memory: PayloadMemory) -> Iterator[Work]:
    num_bytes, given = comm.world_size * parts.num_bytes, flat.view(torch.uint8)
    received = memory.allocate("received", num_bytes, flat.device)
    is_whole = num_bytes == given.numel()
    rows = given if is_whole else memory.allocate("sent", num_bytes, flat.device)
    if not is_whole:
        rows[: given.numel()].copy_(given)
    yield comm.all_to_all(received.view(flat.dtype), rows.view(flat.dtype))
    own = parts.padded_payload(rows, comm.rank)  # this payload was already sent, so it may be overwritten
    parts.codec.sum_encode_(own, received.view(comm.world_size, -1), parts.size)
    yield comm.all_gather(rows.view(flat.dtype), own.view(flat.dtype))
    memory.free(received=received)
    if not is_whole:
        given.copy_(rows[: given.numel()])
        memory.free(sent=rows)


def scatter_sum(
    out: Tensor, parts: Tensor, comm: Comm, codec: Codec, rounding: Rounding = TO_NEAREST
) -> None:
    """Reduce-scatter encoded values, like `Wire.reduce_scatter`; the sum is not rounded."""
    if comm.world_size == 1:
        out.copy_(parts)
        return
    numel = out.numel()
    num_bytes = codec.num_bytes(numel)
    rows = torch.empty(comm.world_size * num_bytes, dtype=torch.uint8, device=parts.device)
    for rank in range(comm.world_size):
        payload, bounds = rows[rank * num_bytes :][:num_bytes], slice(rank * numel, (rank + 1) * numel)
        rounding.encode_(codec, payload, parts, bounds)
    received = torch.empty_like(rows)
    comm.all_to_all(received, rows).wait()
    codec.sum_(out, received.view(comm.world_size, -1))
