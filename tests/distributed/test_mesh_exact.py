"""Exact sums where ranks share a batch: each of them adds a part of the gradient, and has room for it."""

from __future__ import annotations

import pytest
import torch
from meshes import mesh_of
from ranks import on_ranks
from torch import nn

import pyengine as pe


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [{"dp": 2, "cp": 2}, {"dp": 1, "cp": 4}], ids=["2 x 2", "1 x 4"])
@on_ranks(4)
def test_parts_of_ranks_that_share_a_batch_never_overflow(accumulate, shape):
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
    assert wrong == []


@on_ranks(4)
def test_parts_count_among_the_terms_that_a_sum_takes():
    with pytest.raises(ValueError) as error:
        pe.GradSync(
            nn.Linear(1, 1),
            accumulate=1025,
            accumulator="exact",
            device_mesh=mesh_of(dp=1, cp=4),
            axes=pe.Axes(replicate=("dp", "cp"), count="dp"),
        )
    assert "makes 1025 micro-batches a window over all ranks in 4 parts each" in str(error.value)
