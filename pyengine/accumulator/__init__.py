"""Accumulators: where the sum of a window's gradients lives, bucket by bucket."""

from pyengine.accumulator.base import BucketAccumulator
from pyengine.accumulator.exact import Exact, ExactBucket
from pyengine.accumulator.fp32 import Fp32Bucket
from pyengine.accumulator.native import NativeBucket

KINDS = ("fp32", "native", "exact")

__all__ = ["KINDS", "BucketAccumulator", "Exact", "ExactBucket", "Fp32Bucket", "NativeBucket"]
