"""Orthonormal columns and sums of products with the same bits everywhere: whatever a rank's processor or
library, the same operands give the same result, as only single roundings are used, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Below this, times what a column was, is what float64's roundings leave of one that adds nothing.
_NOTHING = 1e-12
_ROWS_BYTES = 2**20  # of a product's rows that are made at a time, and stay in the cache


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices whose columns are orthonormal and span the same (Gram and Schmidt, twice each).

    Args:
        matrices: float32 `[rows, r]` each, of any rows, on one device; one r.

    Returns:
        float32, as large, the caller's. A column that adds nothing to those before it is zeros; a matrix that
        is not finite gives one that is not.

    Cost: some 10 r + 10 r^2 bytes read and written a row, in float64.
    """
    found: list[Tensor] = [matrix for matrix in matrices]
    of_size: dict[int, list[int]] = {}
    for index, matrix in enumerate(matrices):
        of_size.setdefault(1 << (matrix.shape[0] - 1).bit_length(), []).append(index)
    for rows, indices in of_size.items():
        stack = torch.zeros(
            len(indices), rows, matrices[0].shape[1], dtype=torch.float64, device=matrices[0].device
        )
        for row, index in enumerate(indices):
            stack[row, : matrices[index].shape[0]] = matrices[index]
        _orthonormalize_(stack)
        for row, index in enumerate(indices):
            found[index] = stack[row, : matrices[index].shape[0]].float()
    return found


def _orthonormalize_(stack: Tensor) -> None:
    """Make the columns of `[matrices, rows, r]` orthonormal."""
    for k in range(stack.shape[2]):
        column, before = stack[:, :, k : k + 1], stack[:, :, :k]
        size = _norm(column)
        for _ in range(2 if k else 0):  # the second time takes away what the first one's roundings leave
            dots = _sum(before * column, 1)
            column = column - _sum(before * dots, 2)
        length = _norm(column)
        stack[:, :, k : k + 1] = torch.where(length <= _NOTHING * size, 0.0, column / length)


def _norm(column: Tensor) -> Tensor:
    return _sum(column * column, 1).sqrt()


def _sum(terms: Tensor, dim: int) -> Tensor:
    """Sum along a dimension by halves, which is kept; `terms` is overwritten.

    torch's own sum goes as many elements at a time as a vector of the processor has.
    """
    while (size := terms.shape[dim]) > 1:
        half = (size + 1) // 2
        terms.narrow(dim, 0, size - half).add_(terms.narrow(dim, half, size - half))
        terms = terms.narrow(dim, 0, half)
    return terms


def product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left times right transposed, a rounding a product and a sum, in the order of columns.

    Args:
        out: float32 `[n, m]`, overwritten.
        left: float32 `[n, r]`.
        right: float32 `[m, r]`.

    Cost: 12 r bytes read and written an element, most of them in the cache.
    """
    step = max(1, _ROWS_BYTES // (4 * out.shape[1]))
    columns = right.t().contiguous()
    for start in range(0, out.shape[0], step):
        rows, factors = out[start : start + step], left[start : start + step]
        torch.mul(factors[:, :1], columns[0], out=rows)
        for k in range(1, columns.shape[0]):
            rows.add_(factors[:, k : k + 1] * columns[k])
