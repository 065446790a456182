"""Fused ops that read memory once, and properties of devices.

The public API contains the ops that need no engine (`functional.py`), and the plans of their buffers.
"""

from pyengine.ops.functional import accumulate_, flatten, unflatten_, unscale_norm, unscale_norm_
from pyengine.ops.versions import BucketPlan, ExactSum

__all__ = ["BucketPlan", "ExactSum", "accumulate_", "flatten", "unflatten_", "unscale_norm", "unscale_norm_"]
