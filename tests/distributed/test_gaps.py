"""Parameters whose memory has gaps or is permuted get the same gradients as contiguous parameters.

FSDP2 itself refuses such parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import me, recorded_warnings
from marks import rest
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe

_BIG = (8, 8, 8)
# Views of a large tensor of shape `_BIG`; each parameter has a tensor of its own.
VIEWS = {
    "gaps": lambda big: big[0, :3, :6],
    "gaps, permuted": lambda big: big[0, :3, :6].t(),
    "gaps, permuted in three": lambda big: big[:3, :5, :4].permute(2, 0, 1),
    "every second": lambda big: big[0, ::2, ::2].t(),
    "a column": lambda big: big[0, :, 3],
    "one element": lambda big: big[0, :1, 3:4].t(),
    "dense, permuted": lambda big: big.permute(2, 0, 1),
    "dense, permuted, a row of it": lambda big: big.permute(2, 0, 1)[:, :1],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "native": {"accumulator": "native"},
    "exact": {"accumulator": "exact"},
    "raise": {"nonfinite": "raise"},
    "int8-ef": {"wire": "int8-ef"},
    "bf16": {"wire": "bf16"},
}


class _Views(nn.Module):
    """A module with one parameter per view; the gradient of a parameter is `_numbers(param, number)`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, view in enumerate(VIEWS.values()):
            big = torch.arange(512.0).view(_BIG).to(dtype)
            self.register_parameter(f"view{index}", nn.Parameter(view(big)))

    def forward(self, number: float, *, only: int | None = None) -> Tensor:
        params = [*self.parameters()][slice(None) if only is None else slice(only, only + 1)]
        return sum((p.float() * _numbers(p, number)).sum() for p in params)


def _numbers(param: Any, number: float) -> Tensor:
    """Return the expected gradient: small integers in the order of the shape, times `number`."""
    shape = param.shape
    return number * (torch.arange(float(shape.numel())) % 61).view(shape)


def _window(sync: pe.Sync, model: nn.Module, numbers: list[float]) -> None:
    for window in sync.windows(numbers):
        for index, number in enumerate(window):
            sync.backward(model(number, only=2 if index == 1 else None), count=1)
        sync.unscale_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 2) for name in OPTIONS), ("fp32", 1), *rest(("fp32", 3), ("exact", 3))]
)
@on_ranks()
def test_gradients_have_the_order_of_the_shape(name, world, dtype):
    model = _Views(dtype)
    sync = pe.GradSync(model, accumulate=2, **OPTIONS[name])
    rank, _ = me()
    for _ in range(2):  # with the first window's bucket order, and with the one that ranks agree on
        _window(sync, model, [1.0 + rank, 2.0])
        sum_of_ranks = sum(1.0 + r for r in range(world))
        for index, param in enumerate(model.parameters()):
            want = _numbers(param, (sum_of_ranks + (2 * world if index == 2 else 0)) / (2 * world))
            # int8 rounds twice, by up to 1/254 of a block's largest element, and carries the residual to the
            # next window; bf16 rounds by 2^-8. In a wrong order, most elements would differ by up to 60.
            error = 2 * 60 * 2 * world / 254 if name == "int8-ef" else 1e-4
            narrow = 2**-7 if name == "bf16" or dtype is torch.bfloat16 else 0.0
            assert param.grad.shape == param.shape
            torch.testing.assert_close(param.grad.float(), want, rtol=narrow, atol=error)
        model.zero_grad()


@on_ranks(2)
def test_start_values_are_copied_and_compared_in_the_order_of_the_shape():
    """Equal values with different strides are not reported; different values are replaced by rank 0's."""
    for is_equal in (True, False):
        model = _Views(torch.float32)
        want = [param.detach().clone() for param in model.parameters()]
        if me()[0]:
            for param in model.parameters():
                dense = param.detach().clone(memory_format=torch.contiguous_format)
                param.data = dense if is_equal else dense.zero_()
        values = [(f"p{index}", param.detach()) for index, param in enumerate(model.parameters())]
        frozen = nn.Module()
        for name, value in values:
            frozen.register_buffer(name, value)
        frozen.weight = nn.Parameter(torch.ones(2))
        with recorded_warnings() as messages:
            pe.GradSync(frozen).close()
        assert bool(messages) == (not is_equal and me()[0] == 0)
        assert all(torch.equal(value, one) for (_, value), one in zip(values, want, strict=True))


@on_ranks(2)
def test_a_state_keeps_gradients_that_nobody_has_used_in_their_places():
    model = _Views(torch.float32)
    sync = pe.GradSync(model, accumulate=2)
    _window(sync, model, [1.0, 2.0])
    state = sync.state_dict()
    want = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    sync.load_state_dict(state)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want, strict=True))
