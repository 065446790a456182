"""accumulate_ and accumulate_cast_: sums of gradients in fp32, and the cast of the last sum to the wire."""

import pytest
import torch
from op_cases import INF, assert_same_bits, flags

from pyengine.ops.plan import BucketPlan


@pytest.mark.parametrize(("first", "want"), [(True, 0.0), (False, 4.0)])
def test_a_missing_gradient_is_zero_first_and_nothing_later(isa, first, want, one):
    plan = BucketPlan([0, 5], [5, 3])
    acc, seen, grads = torch.full((8,), 4.0), flags(plan), [None, torch.ones(3)]
    plan.accumulate_(acc, grads, torch.tensor(INF), first=first, nonfinite=seen)
    assert_same_bits(acc[:5], torch.full((5,), want))
    assert seen.tolist() == [0, 1]
    wire = torch.full((8,), 9.0, dtype=torch.bfloat16)
    plan.accumulate_cast_(wire, acc, grads, one, torch.tensor(2.0), first=first, nonfinite=seen)
    assert_same_bits(wire[:5].float(), torch.full((5,), 2 * want))


@pytest.mark.parametrize(
    ("acc", "grad", "factor", "is_flagged"),
    [(0.0, 1e38, 10.0, True), (INF, 1.0, 1.0, False)],
    ids=["a product that overflows", "an infinite sum"],
)
def test_what_a_gradient_makes_infinite_is_flagged_and_not_what_was_infinite_before(
    isa, acc, grad, factor, is_flagged
):
    plan, seen = BucketPlan([0], [17]), torch.zeros(1, dtype=torch.uint8)
    total, grads = torch.full((17,), acc), [torch.full((17,), grad)]
    plan.accumulate_(total, grads, torch.tensor(factor), first=False, nonfinite=seen)
    assert seen.tolist() == [is_flagged]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"acc": torch.zeros(5).bfloat16()}, TypeError, "acc is torch.bfloat16.*expected dtype .*float32"),
        ({"acc": torch.zeros(4)}, ValueError, "acc is .*at least 5 elements"),
        ({"nonfinite": torch.zeros(2)}, TypeError, "nonfinite is torch.float32.*expected dtype torch.uint8"),
        ({"scale": 1.0}, TypeError, "scale is float"),
        (
            {"wire": torch.zeros(5).double(), "wire_scale": torch.tensor(1.0)},
            TypeError,
            "wire is torch.float64",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words, one):
    plan = BucketPlan([0, 2], [2, 3])
    arguments = {"acc": torch.zeros(5), "grads": [torch.ones(2), torch.ones(3)], "scale": one,
                 "first": True, "nonfinite": flags(plan)} | change  # fmt: skip
    if "wire" in change:
        arguments["grad_scale"] = arguments.pop("scale")
    accumulate = plan.accumulate_cast_ if "wire" in change else plan.accumulate_
    with pytest.raises(error, match=words):
        accumulate(**arguments)
