"""Norms are read from each reduced bucket in one operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyengine as pe

CPU = torch.device("cpu")
ONE = torch.tensor(1.0)


class _Count(TorchDispatchMode):
    """Counts torch's operations, each of which is a launch on an accelerator."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def _operations_of_landing(num_buckets: int, wire: pe.wire.Wire) -> int:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_buckets)))
    sync = pe.GradSync(model, accumulate=1, bucket_cap_mb=1e-6, wire=wire)
    for window in sync.windows([torch.ones(2, 8)]):
        for x in window:
            sync.backward(model(x).sum(), count=2)
        with _Count() as count:
            sync.clip_grad_norm_(1e-12)
        sync.unscale_()
    assert all(isinstance(param.grad, Tensor) for param in model.parameters())
    return count.num


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16()], ids=str)
def test_another_bucket_costs_no_operation_but_the_one_that_reads_it(ranks, wire):
    few, many = (ranks(1).run(_operations_of_landing, num, wire)[0] for num in (1, 20))
    assert few == many
