"""A public op increments the version of each tensor that it writes, like PyTorch's in-place ops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pyengine as pe

ONE, FLAGS = torch.tensor(1.0), torch.zeros(1, dtype=torch.uint8)


def _plan() -> pe.ops.BucketPlan:
    return pe.ops.BucketPlan([0], [64])


def _exact() -> pe.ops.ExactSum:
    total = pe.ops.ExactSum(_plan(), numel=64, terms=2, device=torch.device("cpu"))
    total.deposit_([torch.ones(64)], first=True, nonfinite=FLAGS)
    return total


# Each writes to its argument, float32 [64].
WRITES: dict[str, Callable[[Tensor], object]] = {
    "flatten": lambda out: pe.ops.flatten([torch.ones(64)], out=out),
    "unflatten_": lambda out: pe.ops.unflatten_([None, out], torch.ones(65), like=[torch.ones(1), out]),
    "accumulate_": lambda out: pe.ops.accumulate_(out, [torch.ones(64)]),
    "unscale_norm_": lambda out: pe.ops.unscale_norm_([None, out], 0.5),
    "torch.ops.unflatten_": lambda out: torch.ops.pyengine.unflatten_([out], torch.ones(64), ONE, [64], [0]),
    "BucketPlan.pack_": lambda out: _plan().pack_(out, [torch.ones(64)], ONE),
    "BucketPlan.unpack_": lambda out: _plan().unpack_([out], torch.ones(64), ONE),
    "BucketPlan.unpack_, pointers": lambda out: _plan().unpack_(_plan().pointers([out]), torch.ones(64), ONE),
    "BucketPlan.accumulate_": lambda out: _plan().accumulate_(
        out, [torch.ones(64)], ONE, first=False, nonfinite=FLAGS
    ),
    "BucketPlan.accumulate_cast_": lambda out: _plan().accumulate_cast_(
        out, torch.ones(64), [torch.ones(64)], ONE, ONE, first=False, nonfinite=FLAGS
    ),
    "BucketPlan.unscale_norm": lambda out: _plan().unscale_norm(
        [torch.ones(64)], [out], ONE, sumsq=torch.empty(1, dtype=torch.float64), nonfinite=FLAGS
    ),
    "ExactSum.round_": lambda out: _exact().round_(out),
}


@pytest.mark.parametrize("name", WRITES)
def test_autograd_refuses_a_saved_tensor_that_an_op_has_overwritten(name):
    factor = torch.full((64,), 3.0)
    weight = torch.ones(64, requires_grad=True)
    product = (weight * factor).sum()
    WRITES[name](factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_increments_versions_too(backend):
    grad = torch.ones(64)
    pe.ops.unscale_norm([grad], 0.5)
    pe.ops.flatten([grad])
    assert grad._version == 0  # reading does not increment it
    torch.compile(WRITES["unscale_norm_"], backend=backend)(grad)
    assert grad._version > 0


def test_the_parts_of_an_exact_sum_have_versions_too():
    total = _exact()
    before = total.hi._version, total.lo._version, total.bins._version
    total.align_(total.bins.clone())
    after = total.hi._version, total.lo._version, total.bins._version
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_tensors_made_in_inference_mode_have_no_version_and_are_written_all_the_same():
    with torch.inference_mode():
        out = torch.zeros(64)
        pe.ops.unflatten_([out], torch.ones(64))
    assert torch.equal(out, torch.ones(64))
