"""Matrices that travel as a product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from numbers import Real
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work, ring_bytes
from pyengine.comm.staged import Staged
from pyengine.ops.device import HOST
from pyengine.wire.base import Wire
from pyengine.wire.bucket_wire import OfBucket, without_memory
from pyengine.wire.memory import BucketMemory, Place
from pyengine.wire.orthonormal import orthonormal, product_
from pyengine.wire.spelled import Spelled


@dataclass(frozen=True, repr=False)
class PowerSGD(Spelled):
    """Send of each parameter's gradient, as a matrix, an approximation of low rank, and keep the rest for the
    next window (Vogels, Karimireddy, Jaggi 2019).

    A parameter of two or more dimensions is a matrix M of n rows, those of the first dimension as it is
    stored, and m columns. With the directions Q `[m, rank]` of the window before, the ranks sum P = M Q and
    make its columns orthonormal, sum Q' = Mᵀ P, and take P Q'ᵀ for the sum of all M: one step of subspace
    iteration, which follows the largest singular values from window to window. Each rank keeps of its own M
    what lies outside of P, M - P Pᵀ M, and adds it to what it sends in the next window.

    So over any number of windows the sum of what has arrived lacks the residuals that are left, and float32's
    roundings; a rank's residual is never longer (in the Frobenius norm) than what the rank was to send. That
    alone does not bound it over many windows: it does where the directions catch a part of every gradient,
    as they do of gradients whose largest directions change slowly. A sum of at most `rank` directions
    arrives whole once they are found.

    1/count comes in before the residual is added, as under `ErrorFeedback`, and a window that is not used
    takes the residuals with it; the directions stay. A matrix with inf or nan on any rank is nan on all of
    them, and changes no direction.

    Args:
        rank: columns of P and Q.
        min_ratio: a parameter is sent so if that takes at least so many times fewer elements; others, those
            of one dimension among them, are sent in float32 as they are.

    Raises:
        TypeError, ValueError: a rank or ratio that is none.

    Cost: 8 rank (n + m) (W - 1) / W bytes sent a matrix, and 8 (W - 1) / W an element of the others, in two
    all-reduces a bucket; 4 bytes an element kept, and 4 rank m a matrix; three products of rank `rank`, and
    12 rank bytes read and written an element.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    folds_count: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = True

    rank: int = 1
    _: KW_ONLY
    min_ratio: float = 2.0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(
                f"rank={self.rank!r}: need a whole number of at least 1; PowerSGD() is of rank 1"
            )
        ratio = self.min_ratio
        if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 1 <= ratio < math.inf:
            raise ValueError(
                f"min_ratio={ratio!r}: need a number of at least 1, below which nothing is saved"
            )

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket, whose residuals and directions lie in `memory`."""
        return _PowerBucket(self, memory)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        raise without_memory(self)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Raise ValueError: that depends on the parameters' shapes. `StepRecord.bytes_on_wire` has it."""
        raise ValueError(
            f"wire={self}: what {numel} elements over {world_size} ranks send depends on the shapes of their "
            "parameters: see StepRecord.bytes_on_wire"
        )


class _Matrix(NamedTuple):
    """A parameter that travels as a product, and where it lies in the bucket."""

    key: Hashable
    offset: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a bucket, a view `[rows, columns]`."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


class _PowerBucket(OfBucket[PowerSGD]):
    """One bucket, whose parameters travel as products or as they are."""

    @cached_property
    def _matrices(self) -> list[_Matrix]:
        found = [_matrix(place) for place in self.memory.places]
        return [matrix for matrix in found if matrix is not None and self._shrinks(matrix)]

    @cached_property
    def _others(self) -> list[slice]:
        """Elements that travel as they are."""
        taken = {matrix.key for matrix in self._matrices}
        rest = [place for place in self.memory.places if place.key not in taken]
        return [slice(place.offset, place.offset + place.numel) for place in rest]

    def _shrinks(self, matrix: _Matrix) -> bool:
        sent = self.wire.rank * (matrix.rows + matrix.columns)
        return matrix.rows * matrix.columns >= self.wire.min_ratio * sent

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        del numel
        first = sum(part.stop - part.start for part in self._others)
        first += self.wire.rank * sum(matrix.rows for matrix in self._matrices)
        second = self.wire.rank * sum(matrix.columns for matrix in self._matrices)
        return ring_bytes(4 * first, world_size) + ring_bytes(4 * second, world_size)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        assert self.memory.places  # or nothing would be sent
        if comm.world_size == 1:
            return Staged(iter(()), 0, flat.device)
        return Staged(self._rounds(flat, comm), 1 + bool(self._matrices), flat.device)

    def _rounds(self, flat: Tensor, comm: Comm) -> Iterator[Work]:
        residual, rank = self.memory.residual, self.wire.rank
        flat += residual
        whole = [matrix.of(flat) for matrix in self._matrices]
        directions = [self._directions(matrix, flat.device) for matrix in self._matrices]
        sent = torch.cat(
            [
                *(_times(m, q).view(-1) for m, q in zip(whole, directions, strict=True)),
                *(flat[part] for part in self._others),
            ]
        )
        yield comm.all_reduce(sent)
        sizes = [matrix.rows * rank for matrix in self._matrices]
        *first, rest = sent.split([*sizes, sent.numel() - sum(sizes)])
        self._put_others(flat, rest)
        if not whole:
            return
        sums = [part.view(-1, rank) for part in first]
        bases = orthonormal(sums)
        thin = torch.cat([_times(m.t(), p).view(-1) for m, p in zip(whole, bases, strict=True)])
        sizes = [matrix.columns * rank for matrix in self._matrices]
        for matrix, m, p, q in zip(self._matrices, whole, bases, thin.split(sizes), strict=True):
            left = matrix.of(residual)
            product_(left, p, q.view(-1, rank))  # as receivers do, so that nothing else is lost
            torch.sub(m, left, out=left)
        yield comm.all_reduce(thin)
        self._bring(flat, sums, bases, [part.view(-1, rank) for part in thin.split(sizes)], directions)

    def _put_others(self, flat: Tensor, rest: Tensor) -> None:
        """Put what has travelled as it is where it belongs: nothing of it is lost."""
        start = 0
        for part in self._others:
            end = start + part.stop - part.start
            flat[part].copy_(rest[start:end])
            self.memory.residual[part].zero_()
            start = end

    def _bring(
        self,
        flat: Tensor,
        sums: list[Tensor],
        bases: list[Tensor],
        thin: list[Tensor],
        directions: list[Tensor],
    ) -> None:
        """Write the products, and keep the directions that lead to them.

        Args:
            flat: the bucket, written.
            sums: of M Q.
            bases: their orthonormal columns P.
            thin: sums of Mᵀ P.
            directions: of this window, Q.
        """
        turned = orthonormal(thin)
        for matrix, s, p, q, new, old in zip(
            self._matrices, sums, bases, thin, turned, directions, strict=True
        ):
            is_bad = ~(torch.isfinite(s).all() & torch.isfinite(q).all())
            product_(matrix.of(flat), p, q)
            matrix.of(flat).masked_fill_(is_bad, float("nan"))
            # A direction that nothing lay in is looked in again.
            is_kept = is_bad | (new == 0).all(0)
            self.memory.factors[matrix.key] = torch.where(is_kept, old, new)

    def _directions(self, matrix: _Matrix, device: torch.device) -> Tensor:
        """Return a matrix's directions `[columns, rank]`: those that were kept, or the first ones."""
        shape = matrix.columns, self.wire.rank
        kept = self.memory.factors.get(matrix.key)
        if kept is None or kept.shape != shape:
            # Of any numbers that are the same everywhere: torch's normal ones depend on the processor.
            generator = torch.Generator().manual_seed(0)
            numbers = torch.randint(-(2**20), 2**20, shape, generator=generator, device=HOST)
            (kept,) = orthonormal([numbers.float()])
        return kept.to(device)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in float32, also where a backward runs under autocast."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _matrix(place: Place) -> _Matrix | None:
    """Return a parameter as it is stored, as a matrix; None of one that has none."""
    if place.param is None or place.param.dim() < 2 or place.numel == 0:
        return None
    shape, strides = place.param.shape, place.param.stride()
    rows = shape[max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim]))]
    return _Matrix(place.key, place.offset, rows, place.numel // rows)
