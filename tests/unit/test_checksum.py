"""The checksum of a state: the same for the same values, however they lie; another one for anything else."""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch

from pyengine.engine.checkpoint.checksum import checksum

VALUE = {
    "sums": {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.ones(0),
    },
    "places": [0, 4],
    "counts": [1.0, float("nan"), -0.0],
    "identity": ("exact", None, True, 3),
}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


ALIKE = {
    "a copy": copy.deepcopy(VALUE),
    "from a file": _saved(VALUE),
    "names in another order": dict(reversed(VALUE.items())),
    "lists for tuples": {**VALUE, "identity": ["exact", None, True, 3], "places": (0, 4)},
    "other strides": {**VALUE, "sums": {**VALUE["sums"], "a": VALUE["sums"]["a"].t().contiguous().t()}},
    "a view": {**VALUE, "sums": {**VALUE["sums"], "b": torch.ones(9, dtype=torch.bfloat16)[::3]}},
    "part of a graph": {
        **VALUE,
        "sums": {**VALUE["sums"], "a": VALUE["sums"]["a"].clone().requires_grad_() * 1},
    },
    "sparse": {**VALUE, "sums": {**VALUE["sums"], "a": VALUE["sums"]["a"].to_sparse()}},
}


@pytest.mark.parametrize("case", ALIKE)
def test_equal_values_have_one_checksum(case):
    assert checksum(ALIKE[case]) == checksum(VALUE)


OTHERS = {
    "another place": {**VALUE, "places": [0, 5]},
    "places in another order": {**VALUE, "places": [4, 0]},
    "zero for minus zero": {**VALUE, "counts": [1.0, float("nan"), 0.0]},
    "an int for a float": {**VALUE, "counts": [1, float("nan"), -0.0]},
    "a bool for an int": {**VALUE, "places": [False, 4]},
    "a word for a number": {**VALUE, "places": ["0", 4]},
    "another name": {**{k: v for k, v in VALUE.items() if k != "places"}, "place": [0, 4]},
    "a value less": {k: v for k, v in VALUE.items() if k != "places"},
    "a value more": {**VALUE, "more": None},
    "another shape": {**VALUE, "sums": {**VALUE["sums"], "a": torch.arange(6.0)}},
    "another type": {**VALUE, "sums": {**VALUE["sums"], "a": torch.arange(6.0).view(2, 3).view(torch.int32)}},
    "nested otherwise": {**VALUE, "places": [[0], 4]},
    "an empty tensor less": {**VALUE, "sums": {k: v for k, v in VALUE["sums"].items() if k != "none"}},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_values_have_another_one(case):
    assert checksum(OTHERS[case]) != checksum(VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float64])
def test_every_bit_of_a_tensor_counts(dtype):
    tensor = torch.zeros(37).to(dtype)
    memory = tensor.view(torch.uint8)
    found = {checksum(tensor)}
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        found.add(checksum(tensor))
        memory[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(memory) + 1


def test_a_scalar_and_the_state_of_a_generator_have_one():
    state = random.Random(1).getstate()
    assert checksum([torch.ones(()), state]) == checksum([torch.ones(()), list(state)])
    assert checksum(state) != checksum(random.Random(2).getstate())


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), b"x", torch.ones(2, device="meta"), {"a": {None: 1, "b": 2}}]
)
def test_what_no_state_holds_has_none(value):
    with pytest.raises(TypeError):
        checksum([value])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_where_a_tensor_lies_does_not_matter():
    assert checksum(VALUE["sums"]["a"].cuda()) == checksum(VALUE["sums"]["a"])
