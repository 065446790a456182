"""Norms and flags by parameter, read from each reduced bucket in one operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyengine as pe
from pyengine.gradients.norms import ReducedNorms
from pyengine.ops.plan import BucketPlan
from pyengine.window.final_pass import FinalPass

CPU = torch.device("cpu")
ONE = torch.tensor(1.0)


@pytest.mark.parametrize("bad", [None, 0, 2, 3])
def test_every_parameter_gets_its_own_norm_and_flag_whatever_the_order_of_buckets(bad):
    """Read parameters 3 and 0, and then 2; 1 and 4 are in no bucket."""
    first, second = (BucketPlan([0, 4], [2, 1]), [3, 0]), (BucketPlan([0], [2]), [2])
    norms, final = ReducedNorms([first, second], CPU), FinalPass(5, CPU)
    values = {3: torch.tensor([1.0, 2.0]), 0: torch.tensor([3.0]), 2: torch.tensor([4.0, 4.0])}
    want = {0: 9.0, 1: 0.0, 2: 32.0, 3: 5.0, 4: 7.0}
    if bad is not None:
        values[bad][0] = want[bad] = torch.inf
    nothing = {index: torch.full_like(value, torch.nan) for index, value in values.items()}
    for of in (nothing, values):  # a window knows nothing of the one before it
        final.reset()
        final.sumsq[4] = 7  # another owner's
        norms.begin()
        norms.read(1, [of[2]], None, ONE)
        norms.read(0, [of[3], of[0]], None, ONE)
        norms.copy_to(final)
    assert final.sumsq.tolist() == [*want.values()]
    assert final.nonfinite.tolist() == [index == bad for index in range(5)]


class _Count(TorchDispatchMode):
    """Counts torch's operations: on an accelerator each is a launch."""

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
