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


def _landed(bad: int | None = None) -> FinalPass:
    """Read parameters 3 and 0, and then 2; 1 and 4 are in no bucket."""
    first = (BucketPlan([0, 4], [2, 1]), [3, 0])
    second = (BucketPlan([0], [2]), [2])
    norms, final = ReducedNorms([first, second], CPU), FinalPass(5, CPU)
    final.sumsq[4] = 7  # another owner's
    values = {3: torch.tensor([1.0, 2.0]), 0: torch.tensor([3.0]), 2: torch.tensor([4.0, 4.0])}
    if bad is not None:
        values[bad][0] = torch.inf
    nothing = [torch.full((numel,), torch.nan) for numel in (2, 1, 2)]
    # A window knows nothing of the one before it.
    for *one, other in (nothing, [values[3], values[0], values[2]]):
        final.reset()
        norms.begin()
        norms.read(1, second[0].pointers([other]), None, ONE)
        norms.read(0, first[0].pointers(one), None, ONE)
        norms.copy_to(final)
    return final


def test_every_parameter_gets_its_own_norm_whatever_the_order_of_buckets():
    final = _landed()
    assert final.sumsq.tolist() == [9.0, 0.0, 32.0, 5.0, 7.0]
    assert final.nonfinite.tolist() == [0] * 5


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_value_that_is_not_finite_flags_its_parameter(bad):
    final = _landed(bad=bad)
    assert [index for index, flag in enumerate(final.nonfinite.tolist()) if flag] == [bad]


def test_without_buckets_nothing_is_handed_over():
    norms, final = ReducedNorms([], CPU), FinalPass(2, CPU)
    norms.begin()
    norms.copy_to(final)
    assert final.sumsq.tolist() == [0.0, 0.0]


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
