"""FSDP2's collectives, counted, and named where they fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.base import Comm, ring_bytes
from pyengine.ops.device import runs_ahead


def _named(comm: Comm) -> AbstractContextManager[None]:
    roll_call = getattr(comm, "roll_call", None)
    return nullcontext() if roll_call is None else roll_call.named()


class CountedAllGather:
    """An all-gather of parameters as it was, that counts.

    Args:
        inner: the unit's own.
        comm: whose traffic it belongs to, and which names the ranks that do not answer.
    """

    def __init__(self, inner: Any, comm: Comm) -> None:
        self._inner, self._comm = inner, comm
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._comm.traffic.count(output_tensor.nbytes - input_tensor.nbytes)
        with _named(self._comm):
            return self._inner(output_tensor, input_tensor, group, async_op)


class CountedReduceScatter:
    """A reduce-scatter of gradients as it was, that counts; arguments as for `CountedAllGather`.

    gloo's own is an all-reduce, which sends twice as much: there ranks exchange the parts and each adds up
    its own, in the order of ranks.
    """

    def __init__(self, inner: Any, comm: Comm) -> None:
        self._is_slow = type(inner).__name__ == "DefaultReduceScatter"
        self._inner, self._comm = inner, comm
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._comm.traffic.count(input_tensor.nbytes - output_tensor.nbytes)
        with _named(self._comm):
            if self._is_slow and _is_gloo(group, input_tensor):
                return _exchange_and_add(output_tensor, input_tensor, group)
            return self._inner(output_tensor, input_tensor, group, op, async_op)


def _is_gloo(group: Any, tensor: Tensor) -> bool:
    return not runs_ahead(tensor.device) and group._get_backend(tensor.device).name().lower() == "gloo"


def _exchange_and_add(output: Tensor, parts: Tensor, group: Any) -> None:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    torch.sum(received.view(group.size(), -1), 0, out=output)


def counted_all_reduce(comm: Comm, replicas: int) -> Callable[[Tensor], None]:
    """Return a hook behind the all-reduce over replicas, that counts it.

    Args:
        comm: whose traffic it belongs to.
        replicas: ranks that it sums over.
    """

    def count(reduced: Tensor) -> None:
        comm.traffic.count(ring_bytes(reduced.nbytes, replicas))

    return count
