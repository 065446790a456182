"""1/count comes in once: before the wire, after it, or with the optimizer."""

from __future__ import annotations

import pytest
import torch

from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.wire import BF16, FP16, FP32


@pytest.mark.parametrize(
    ("wire", "in_place", "where"),
    [
        (FP32(), True, "optimizer"),
        (FP32(), False, "after"),
        (BF16(), True, "optimizer"),
        (BF16(), False, "after"),
        (FP16(), True, "before"),
        (FP16(), False, "before"),
    ],
    ids=str,
)
def test_one_over_count_comes_in_at_one_place(wire, in_place, where):
    asked = []

    def inv_count() -> torch.Tensor:
        asked.append(None)
        return torch.tensor(0.125)

    divisor, final = Divisor(inv_count, wire, in_place=in_place), FinalPass(1, torch.device("cpu"))
    divisor.leave_to(final)
    given = {
        "before": divisor.before_wire(),
        "after": divisor.after_wire(),
        "optimizer": final.factor if final.factor != 1 else None,
    }
    assert {place: float(scalar) for place, scalar in given.items() if scalar is not None} == {where: 0.125}
    assert len(asked) == 1  # nobody waits for the header without need
