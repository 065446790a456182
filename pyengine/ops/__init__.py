"""Fused ops that read memory once, and properties of devices.

The public API consists of the ops that need no engine (`functional.py`), and of `BucketPlan` and `ExactSum`.
"""

from pyengine.ops.functional import accumulate_, flatten, unflatten_, unscale_norm, unscale_norm_
from pyengine.ops.versions import BucketPlan, ExactSum

__all__ = ["BucketPlan", "ExactSum", "accumulate_", "flatten", "unflatten_", "unscale_norm", "unscale_norm_"]
