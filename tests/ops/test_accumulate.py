"""accumulate_ and accumulate_cast_: sums of gradients in fp32, and the cast of the last sum to the wire."""

import pytest
import torch
from op_cases import INF, assert_same_bits, flags, make_flat, make_plan, make_tensors, random_values

from pyengine.ops.plan import BucketPlan

FIRST = [True, False]


def test_a_window_of_integers_sums_exactly(one):
    plan, seen = make_plan(), flags(make_plan())
    grads = [torch.arange(n).remainder(64).to(torch.bfloat16) for n in plan.numels]
    acc, wire = (make_flat(plan, torch.float32) for _ in range(2))
    plan.accumulate_(acc, grads, one, first=True, nonfinite=seen)
    plan.accumulate_(acc, grads, torch.tensor(2.0), first=False, nonfinite=seen)
    plan.accumulate_cast_(wire, acc, grads, one, torch.tensor(0.5), first=False, nonfinite=seen)
    got = [torch.zeros(n) for n in plan.numels]
    plan.unpack_(got, wire, one)
    assert_same_bits(got, [2 * g.float() for g in grads])
    assert not seen.any()


def test_accumulate_errs_by_one_product_and_one_sum(scale):
    plan = BucketPlan([0], [40001])
    g, acc = random_values(40001, torch.bfloat16, seed=2), random_values(40001, torch.float32, seed=3)
    product = g.double() * scale.double()
    exact, unit = acc.double() + product, 2**-24
    plan.accumulate_(acc, [g], scale, first=False, nonfinite=flags(plan))
    # u·|p| for the product (or half a denormal), then u of the rounded sum.
    bound = product.abs() * unit + 2**-150
    bound = bound + (exact.abs() + bound) * unit
    assert ((acc.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("first", FIRST)
def test_a_missing_gradient_is_zero_first_and_nothing_later(isa, first, one):
    plan = BucketPlan([0, 5], [5, 3])
    acc, seen = torch.full((8,), 4.0), flags(plan)
    plan.accumulate_(acc, [None, torch.ones(3)], torch.tensor(INF), first=first, nonfinite=seen)
    assert_same_bits(acc[:5], torch.zeros(5) if first else torch.full((5,), 4.0))
    assert seen.tolist() == [0, 1]


@pytest.mark.parametrize(("first", "want"), [(True, 0.0), (False, 8.0)])
def test_without_a_gradient_the_wire_carries_the_sum_alone(isa, first, want, one):
    plan = BucketPlan([0], [20])
    wire, acc = torch.full((20,), 9.0, dtype=torch.bfloat16), torch.full((20,), 4.0)
    plan.accumulate_cast_(wire, acc, [None], one, torch.tensor(2.0), first=first, nonfinite=flags(plan))
    assert torch.equal(wire.float(), torch.full((20,), want))


def test_a_product_that_overflows_is_flagged(isa):
    plan, seen = BucketPlan([0], [17]), torch.zeros(1, dtype=torch.uint8)
    g = torch.full((17,), 1e38)
    plan.accumulate_(torch.zeros(17), [g], torch.tensor(10.0), first=True, nonfinite=seen)
    assert seen.tolist() == [1]


def test_an_infinite_sum_alone_is_not_the_gradients_fault(isa, one):
    plan, seen = BucketPlan([0], [17]), torch.zeros(1, dtype=torch.uint8)
    plan.accumulate_(torch.full((17,), INF), [torch.ones(17)], one, first=False, nonfinite=seen)
    assert seen.tolist() == [0]


def test_minus_zero_and_denormals_survive_the_first_micro_batch(isa, one):
    plan, acc = BucketPlan([0], [36]), torch.ones(36)
    grads = torch.tensor([-0.0, 1e-45, -1e-40]).repeat(12)
    plan.accumulate_(acc, [grads], one, first=True, nonfinite=flags(plan))
    assert_same_bits(acc, grads)


def test_the_wire_may_be_acc_itself(isa, scale, one):
    plan = make_plan()
    grads, acc = make_tensors(plan, torch.bfloat16), make_flat(plan, torch.float32)
    want = acc.clone()
    plan.accumulate_cast_(want, acc, grads, scale, one, first=False, nonfinite=flags(plan))
    plan.accumulate_cast_(acc, acc, grads, scale, one, first=False, nonfinite=flags(plan))
    assert_same_bits(acc, want)


def test_offsets_beyond_two_to_the_31_are_reached(one):
    far = 2**31 + 11
    acc = torch.empty(far + 40)  # only the pages that are written become memory
    plan = BucketPlan([3, far], [5, 33])
    grads, seen = [torch.ones(5), torch.arange(33.0)], flags(plan)
    plan.accumulate_(acc, grads, one, first=True, nonfinite=seen)
    plan.accumulate_(acc, grads, one, first=False, nonfinite=seen)
    assert torch.equal(acc[far : far + 33], 2 * torch.arange(33.0))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"acc": torch.zeros(5, dtype=torch.bfloat16)},
            TypeError,
            "acc is torch.bfloat16.*needed dtype torch.float32",
        ),
        ({"acc": torch.zeros(4)}, ValueError, "acc is .*at least 5 elements"),
        ({"nonfinite": torch.zeros(2)}, TypeError, "nonfinite is torch.float32.*needed dtype torch.uint8"),
        ({"scale": 1.0}, TypeError, "scale is float"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words, one):
    plan = BucketPlan([0, 2], [2, 3])
    arguments = {"acc": torch.zeros(5), "grads": [torch.ones(2), torch.ones(3)], "scale": one,
                 "first": True, "nonfinite": flags(plan)}  # fmt: skip
    with pytest.raises(error, match=words):
        plan.accumulate_(**(arguments | change))


def test_the_wire_of_a_wrong_dtype_is_named(one):
    plan = BucketPlan([0], [2])
    with pytest.raises(TypeError, match="wire is torch.float64"):
        plan.accumulate_cast_(
            torch.zeros(2).double(), torch.zeros(2), [None], one, one, first=True, nonfinite=flags(plan)
        )
