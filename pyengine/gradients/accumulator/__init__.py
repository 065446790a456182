"""Accumulators: where the sum of a window's gradients lives, bucket by bucket.
A new kind is a file here and a line below.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.accumulator.base import BucketAccumulator
from pyengine.gradients.accumulator.exact import Exact, ExactBucket
from pyengine.gradients.accumulator.fp32 import Fp32Bucket
from pyengine.gradients.accumulator.native import NativeBucket
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import Bucket
from pyengine.gradients.local_part import LocalPart
from pyengine.wire import Wire

KINDS = ("fp32", "native", "exact")

__all__ = ["KINDS", "BucketAccumulator", "Exact", "as_accumulator", "bucket_accumulator", "sum_dtype"]


def as_accumulator(accumulator: str | Exact | torch.dtype) -> str | Exact:
    """Return "fp32" for torch.float32; anything else stays as given, for `Settings` to judge."""
    return "fp32" if accumulator is torch.float32 else accumulator  # type: ignore[return-value]


def sum_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of `dtype` are summed: narrow ones in float32, unless "native" keeps
    their own.

    What "exact" sums them in has no type: it is a number of bits.
    """
    return torch.float32 if kind == "fp32" and dtype.itemsize < torch.float32.itemsize else dtype


def bucket_accumulator(
    kind: str,
    bucket: Bucket,
    params: Sequence[Parameter],
    *,
    wire: Wire,
    terms: Terms,
    watch: bool,
    comm: Comm,
    apart: bool = False,
) -> BucketAccumulator:
    """Make the accumulator of one bucket.

    Args:
        kind: one of `KINDS`.
        bucket: its place in the layout.
        params: the bucket's, in slot order.
        wire: how it travels.
        terms: of a full window.
        watch: whether every micro-batch is checked for inf and nan.
        comm: by which it travels.
        apart: whether `.grad` holds a micro-batch's gradient alone until that is accumulated: sums are then
            in memory of their own, fp32 at least, which no layer gets to see.
    """
    if kind == "exact":
        return ExactBucket(bucket, params, terms=terms, comm=comm)
    # Autograd cannot add in place to what a DTensor's `.grad` is a view of, unnoticed.
    has_parts = any(isinstance(param, LocalPart) for param in params)
    if apart or has_parts or sum_dtype(kind, bucket.dtype) != bucket.dtype:
        return Fp32Bucket(bucket, params, wire=wire, comm=comm, offers=not apart)
    return NativeBucket(bucket, params, wire=wire, comm=comm, watch=watch)
