"""pack_ and unpack_: flat[slot] = cast(tensor * scale) and back."""

import pytest
import torch
from op_cases import DTYPES, SHIFTS, assert_same_bits, random_values

from pyengine.ops.plan import BucketPlan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_casts_to_the_same_bits_on_every_instruction_set(isa, dtype, one):
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FA12345] * 5, dtype=torch.int32)
    flat = torch.empty(20, dtype=dtype)
    BucketPlan([0], [20]).pack_(flat, [payloads.view(torch.float32)], one)
    want = {torch.bfloat16: [0x7FC0] * 4, torch.float16: [0x7E00, 0x7E00, 0x7FFF, 0x7F09]}[dtype]
    assert flat.view(torch.int16).tolist() == want * 5


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dst", DTYPES)
def test_large_flat_buffers_are_streamed_with_the_same_bits(isa, dst, shift, scale):
    numel = 5 * 2**20 + 7  # above 8 MiB in every dtype
    plan = BucketPlan([shift], [numel])
    x = random_values(numel, torch.bfloat16, seed=3)
    flat = torch.zeros(numel + 9, dtype=dst)
    plan.pack_(flat, [x], scale)
    assert_same_bits(flat[shift : shift + numel], (x.float() * scale).to(dst))
    assert flat[:shift].eq(0).all() and flat[shift + numel :].eq(0).all()


def test_offsets_beyond_two_to_the_31_are_reached(one):
    far = 2**31 + 11
    flat = torch.empty(far + 40)  # only the pages that are written use memory
    plan, tensors = BucketPlan([3, far], [5, 33]), [torch.ones(5), torch.arange(33.0)]
    plan.pack_(flat, tensors, one)
    plan.accumulate_(flat, tensors, one, first=False, nonfinite=torch.zeros(2, dtype=torch.uint8))
    assert torch.equal(flat[far : far + 33], 2 * torch.arange(33.0))
    back = [torch.zeros(5), torch.zeros(33)]
    plan.unpack_(back, flat, one)
    assert torch.equal(back[1], 2 * torch.arange(33.0)) and torch.equal(back[0], 2 * torch.ones(5))


def test_a_tensor_subclass_is_read_too(one):
    class Marked(torch.Tensor):
        pass

    flat = torch.empty(4)
    BucketPlan([0], [4]).pack_(flat, [torch.ones(4).as_subclass(Marked)], one)
    assert torch.equal(flat, torch.ones(4))


@pytest.mark.parametrize(
    ("offsets", "numels", "words"),
    [
        ([0], [1, 2], "offsets has 1 entries and numels 2"),
        ([-1], [1], "slot 0 has offset -1"),
        ([4, 0], [2, 5], "slots 1 and 0 overlap: slot 1 ends at 5, slot 0 begins at 4"),
        ([0], [2**62], r"expected at most 2\*\*40"),
        ([2**70], [1], r"expected at most 2\*\*40"),
        ([0, 2**40 + 1], [4, 0], f"slot 1 begins at element {2**40 + 1}; expected at most 2"),
        ([0.5], [2], "integer"),
    ],
)
def test_an_impossible_layout_is_refused_in_words(offsets, numels, words):
    with pytest.raises((ValueError, TypeError), match=words):
        BucketPlan(offsets, numels)


TWO, THREE, SCALE = torch.ones(2), torch.ones(3), torch.tensor(1.0)
OTHER_PLAN = BucketPlan([0], [2])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tensors": [TWO]}, ValueError, "tensors has 1 tensors; expected 2"),
        ({"tensors": [TWO, torch.ones(4)]}, ValueError, r"tensors\[1\] has 4 elements; expected 3"),
        ({"tensors": [TWO, THREE.bfloat16()]}, ValueError, r"\[1\] is torch.bfloat16.*one plan per"),
        ({"tensors": [TWO, THREE.double()]}, TypeError, r"tensors\[1\] is torch.float64 .*expected dtype"),
        ({"tensors": [TWO, torch.ones(6)[::2]]}, ValueError, r"\[1\].*stride \(2,\).*contiguous\(\)"),
        ({"tensors": [TWO, THREE.to_sparse()]}, ValueError, r"tensors\[1\].*to_dense"),
        ({"tensors": [TWO, 3.0]}, TypeError, r"tensors\[1\] is float; expected a torch.Tensor"),
        ({"tensors": [TWO.to("meta"), None]}, ValueError, "tensors are on meta; expected cpu"),
        ({"tensors": OTHER_PLAN.pointers([TWO])}, ValueError, "Pointers of another plan"),
        ({"flat": torch.empty(4)}, ValueError, r"flat is .*\(4,\).*at least 5 elements"),
        ({"flat": torch.empty(5).double()}, TypeError, "flat is torch.float64"),
        ({"scale": 1.0}, TypeError, r"scale is float; .*torch.tensor\(1.0\)"),
        ({"scale": torch.ones(1)}, ValueError, "scale is .*0-dim"),
        ({"scale": SCALE.double()}, ValueError, "scale is torch.float64"),
        ({"only_if": torch.tensor(1)}, ValueError, "only_if is "),
        ({"only_if": True}, TypeError, "only_if is "),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    arguments = {"flat": torch.empty(5), "tensors": [TWO, THREE], "scale": SCALE} | change
    with pytest.raises(error, match=words):
        BucketPlan([0, 2], [2, 3]).pack_(**arguments)
