"""Orthonormal columns and products: right, and with the same bits whatever is computed beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyengine.wire.orthonormal import orthonormal, product_


def _matrix(rows: int, rank: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (4, 4), (7, 3), (129, 2), (1000, 5)])
def test_columns_are_orthonormal_and_span_the_same(rows, rank):
    matrix = _matrix(rows, rank)
    (found,) = orthonormal([matrix])
    wide = found.double()
    # float64's roundings are lost in float32's, of which every element has one.
    assert (wide.t() @ wide - torch.eye(rank, dtype=torch.float64)).abs().max() <= rank * 2.0**-22
    lacks = matrix.double() - wide @ (wide.t() @ matrix.double())
    assert lacks.norm() <= matrix.norm() * rank * 2.0**-22


def test_nearly_dependent_columns_are_orthonormal_too():
    matrix = _matrix(50, 3)
    matrix[:, 1] = matrix[:, 0] * (1 + 2.0**-20) + 2.0**-18 * matrix[:, 2]
    (found,) = orthonormal([matrix])
    assert (found.t() @ found - torch.eye(3)).abs().max() <= 2.0**-20


def test_a_column_that_adds_nothing_is_zeros():
    matrix = _matrix(10, 4)
    matrix[:, 0] = 0
    matrix[:, 2] = 2 * matrix[:, 1]
    (found,) = orthonormal([matrix])
    assert found.norm(dim=0).tolist() == pytest.approx([0, 1, 0, 1], abs=1e-6)
    assert not found[:, 0].any() and not found[:, 2].any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_matrix_that_is_not_finite_stays_so_and_others_do_not_become_so(value):
    bad, good = _matrix(5, 2), _matrix(6, 2)
    bad[3, 1] = value
    found = orthonormal([bad, good])
    assert not found[0].isfinite().all() and found[1].isfinite().all()


def test_bits_do_not_depend_on_what_is_beside():
    mine = _matrix(37, 3)
    (alone,) = orthonormal([mine])
    _, found, _ = orthonormal([_matrix(64, 3, 1), mine, _matrix(5, 3, 2)])
    assert torch.equal(found, alone)


def test_extremes_of_float32_do_not_overflow():
    for size in (1e-38, 1e37):
        (found,) = orthonormal([_matrix(20, 2) * size])
        assert found.norm(dim=0).tolist() == pytest.approx([1, 1], rel=1e-6)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (3, 5, 2), (700, 900, 3)])
def test_a_product_is_rounded_once_a_product_and_a_sum_in_order(rows, columns, rank):
    left, right, out = _matrix(rows, rank), _matrix(columns, rank, 1), torch.empty(rows, columns)
    product_(out, left, right)
    want = left[:, :1] * right[:, 0]
    for k in range(1, rank):
        term = left[:, k : k + 1] * right[:, k]
        want = want + term
    assert torch.equal(out, want)
    exact = left.double() @ right.double().t()
    size = left.double().abs() @ right.double().abs().t()
    assert ((out.double() - exact).abs() <= 2 * rank * 2.0**-24 * size).all()
