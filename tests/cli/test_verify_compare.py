"""Bitwise comparison of tensors, and causes of differences that are hard to provoke in a run."""

from __future__ import annotations

import math

import pytest
import torch

from pyengine.cli.verify.compare import Difference, causes, change, compare, first_difference
from pyengine.cli.verify.probe import Trace, digest

SAME = [torch.tensor([math.nan, 1.0]), torch.tensor(3), torch.tensor([]), torch.tensor([True])]
DIFFERENT = [
    (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(4).bfloat16(), torch.tensor([0, 0, 0, 1e-30]).bfloat16()),
]


@pytest.mark.parametrize("tensor", SAME, ids=str)
def test_same_bits_are_the_same(tensor):
    assert compare(tensor, tensor.clone()) == ""
    assert digest(tensor) == digest(tensor.clone())


@pytest.mark.parametrize(("ours", "theirs"), DIFFERENT, ids=str)
def test_other_sign_type_shape_or_last_bit_is_different(ours, theirs):
    assert compare(ours, theirs)
    assert digest(ours) != digest(theirs)


def test_elements_are_counted_and_the_largest_difference_has_its_index():
    theirs = torch.zeros(3, 4)
    theirs[1, 2], theirs[2, 3] = 0.5, -2.0
    found = compare(torch.zeros(3, 4), theirs)
    assert "Mismatched elements: 2 / 12" in found
    assert "Greatest absolute difference: 2.0 at index (2, 3)" in found


def test_signs_of_zeros_and_missing_gradients_are_named():
    assert "signs of zeros" in compare(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert compare(torch.zeros(2, 3), None) == "The tensor is missing from the run."


def test_sparse_gradient_has_the_digest_of_its_values():
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert digest(dense.to_sparse()) == digest(dense)


def test_earlier_step_comes_before_earlier_kind_and_lower_rank():
    keys = [(step, kind, "w") for step in (0, 1) for kind in ("gradient", "parameter")]
    reference = Trace(dict.fromkeys(keys, "a"))
    late, early = Trace({**reference.entries}), Trace({**reference.entries})
    late.entries[1, "gradient", "w"] = "b"
    early.entries[0, "parameter", "w"] = "b"
    found = first_difference(reference, [late, early])
    assert found is not None
    assert (found.step, found.kind, found.rank) == (0, "parameter", 1)
    assert found.counts == {"gradient": (0, 1), "parameter": (1, 1)}


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [("norm", "norm", "norm"), ("state", "w.exp_avg", "optimizer"), ("buffer", "cache", "buffers")],
)
def test_what_differs_alone_has_a_cause_of_its_own(kind, name, cause):
    first = Difference(2, kind, name, 0, counts={"gradient": (0, 3), kind: (1, 1)}, texts=("a", "b"))
    found = causes(first, repeats=False, came_back=True, micro_batches=12, gradient=None)
    assert [name for name, _ in found] == [cause]


def test_gradient_of_zero_has_no_relative_change():
    tensors = {("gradient", "w"): torch.zeros(3)}
    assert change(tensors, tensors) is None
