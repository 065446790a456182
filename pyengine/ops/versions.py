"""The public `BucketPlan` and `ExactSum`, which increment the versions of tensors that they write to.

The core writes by address, which does not change version counters. Without increments, autograd would not
notice that a tensor saved for backward was overwritten, and the engine would not notice a write to a
gradient. The engine's internal plans write only to the engine's own memory, so they skip the increments,
which take 0.1 µs per tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyengine.ops import exact, plan
from pyengine.ops.pointers import Pointers

_Op = TypeVar("_Op", bound=Callable[..., Any])


def _incrementing(op: _Op, *written: str) -> _Op:
    """Return a method that runs `op` and then increments versions, like the in-place ops of PyTorch.

    `written` contains the names of the arguments to which `op` writes. A name that starts with a dot is the
    name of an attribute.
    """
    signature = inspect.signature(op)

    @functools.wraps(op)
    def run(self: Any, *args: Any, **options: Any) -> None:
        op(self, *args, **options)
        given = signature.bind(self, *args, **options).arguments
        tensors: list[Tensor] = []
        for name in written:
            item = getattr(self, name[1:]) if name[0] == "." else given[name]
            if isinstance(item, Tensor):
                tensors.append(item)
            elif item is not None:
                entries = item.tensors if isinstance(item, Pointers) else item
                tensors += [tensor for tensor in entries if tensor is not None]
        torch.autograd.graph.increment_version(tensors)

    return run  # type: ignore[return-value]


class BucketPlan(plan.BucketPlan):
    __doc__ = plan.BucketPlan.__doc__

    pack_ = _incrementing(plan.BucketPlan.pack_, "flat")
    unpack_ = _incrementing(plan.BucketPlan.unpack_, "tensors")
    accumulate_ = _incrementing(plan.BucketPlan.accumulate_, "acc", "nonfinite")
    accumulate_cast_ = _incrementing(plan.BucketPlan.accumulate_cast_, "wire", "nonfinite")
    unscale_norm = _incrementing(plan.BucketPlan.unscale_norm, "out", "sumsq", "nonfinite")


class ExactSum(exact.ExactSum):
    __doc__ = exact.ExactSum.__doc__

    deposit_ = _incrementing(exact.ExactSum.deposit_, ".limbs", ".bins", "nonfinite")
    align_ = _incrementing(exact.ExactSum.align_, ".limbs", ".bins")
    round_ = _incrementing(exact.ExactSum.round_, "out")
