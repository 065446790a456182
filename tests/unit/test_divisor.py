"""1/count and the inverse loss scale are applied once, each at one place."""

from __future__ import annotations

import pytest
import torch

from pyengine.window.divisor import Divisor
from pyengine.wire import BF16, FP16, FP32


@pytest.mark.parametrize("inv_scale", [None, 0.25])
@pytest.mark.parametrize(("wire", "is_before"), [(FP32(), False), (BF16(), False), (FP16(), True)], ids=str)
def test_one_over_count_comes_in_at_one_place_and_the_loss_scale_goes_behind_the_wire(
    wire, is_before, inv_scale
):
    asked = []

    def inv_count() -> torch.Tensor:
        asked.append(None)
        return torch.tensor(0.125)

    divisor = Divisor(
        inv_count, wire, None if inv_scale is None else torch.tensor(inv_scale, dtype=torch.float64)
    )
    before, after = divisor.before_wire(), divisor.after_wire()
    assert before is None or before.dtype == torch.float32
    assert after is None or after.dtype == torch.float32
    behind = (1.0 if is_before else 0.125) * (inv_scale or 1.0)
    assert (1.0 if before is None else before.item()) == (0.125 if is_before else 1.0)
    assert (1.0 if after is None else after.item()) == behind
    assert (after is None) == (behind == 1.0)  # no unnecessary pass
    assert len(asked) == 1  # no unnecessary wait for the header
