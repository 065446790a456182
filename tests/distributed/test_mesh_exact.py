"""Exact sums where ranks share a batch: each of them adds a part of the gradient, and has room for it."""

from __future__ import annotations

import pytest
import torch
from meshes import mesh_of
from torch import nn

import pyengine as pe


def _wrong(accumulate: int, shape: dict[str, int]) -> list[tuple[float, float, float]]:
    """Return magnitude, gradient and right one wherever a sum of equal parts is off."""
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(
        model,
        accumulate=accumulate,
        accumulator="exact",
        device_mesh=mesh_of(**shape),
        axes=pe.Axes(replicate=("dp", "cp"), count="dp"),
    )
    wrong = []
    for exponent in range(-10, 30, 3):
        for mantissa in (1.0, 1.75):  # a tie between two integers of the grid, and what fills one
            x = mantissa * 2.0**exponent
            for window in sync.windows([torch.full((1, 1), x)] * accumulate):
                for batch in window:
                    sync.backward(model(batch).sum())
                sync.unscale_()
                found, right = float(model.weight.grad), x * shape["cp"]
                if found != right:
                    wrong.append((x, found, right))
                sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    return wrong


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [{"dp": 2, "cp": 2}, {"dp": 1, "cp": 4}], ids=["2 x 2", "1 x 4"])
def test_parts_of_ranks_that_share_a_batch_never_overflow(ranks, accumulate, shape):
    assert ranks(4).run(_wrong, accumulate, shape) == [[]] * 4


def _too_many() -> str:
    with pytest.raises(ValueError) as error:
        pe.GradSync(
            nn.Linear(1, 1),
            accumulate=1025,
            accumulator="exact",
            device_mesh=mesh_of(dp=1, cp=4),
            axes=pe.Axes(replicate=("dp", "cp"), count="dp"),
        )
    return str(error.value)


def test_parts_count_among_the_terms_that_a_sum_takes(ranks):
    for message in ranks(4).run(_too_many):
        assert "makes 1025 micro-batches a window over all ranks in 4 parts each" in message
