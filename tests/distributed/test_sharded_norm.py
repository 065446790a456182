"""The norm over ranks that hold different elements: each counts once, with the same bits on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from cases import me
from ranks import on_ranks

from pyengine.comm import comm_for
from pyengine.window.final_pass import FinalPass, ShardedNorm

CPU = torch.device("cpu")


def _final(counted: list[bool], sumsq: list[float]) -> FinalPass:
    final = FinalPass(2, CPU, ShardedNorm(counted, comm_for(CPU, None), CPU))
    final.sumsq.copy_(torch.tensor(sumsq))
    return final


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@on_ranks(2)
def test_what_is_not_finite_where_no_element_counts_skips_the_step_on_all(bad):
    rank, _ = me()
    final = _final([rank == 0, rank == 0], [1.0, bad if rank else 2.0])
    final.compute_norm()
    assert final.found_inf


@on_ranks(2)
def test_a_norm_that_is_computed_again_counts_what_one_rank_has_changed():
    """One rank's gradients are changed after clipping."""
    rank, _ = me()
    final = _final([rank == 0, True], [9.0, 16.0])
    final.compute_norm()
    assert final.clip(math.sqrt(41) / 2, final.grad_norm()).item() == pytest.approx(0.5)
    if rank:
        final.sumsq.copy_(torch.tensor([9.0, 4.0]))
    final.renew_norm(was_read=rank == 1)
    assert final.grad_norm().item() == pytest.approx(math.sqrt(25 / 4 + 4), rel=1e-6)


@on_ranks(2)
def test_nothing_is_exchanged_behind_a_header_in_which_ranks_disagree():
    final = _final([True, True], [2.0, 2.0])
    if me()[0] == 0:  # the other rank runs another engine's window, so nothing may follow its header
        final.compute_norm(is_refused=True)
    assert (final.grad_norm().item() if me()[0] == 0 else 2.0) == 2.0


@pytest.mark.parametrize(
    "values", [[1.0, 8.0, 2.0], [0.0, 0.0, 0.0], [1.0, math.inf, 2.0], [1.0, math.nan, math.inf]], ids=str
)
@on_ranks(3)
def test_the_largest_value_of_any_rank_counts_and_nan_stays_nan(values):
    rank, _ = me()
    want = math.nan if any(map(math.isnan, values)) else max(values)
    found = _final([True, True], [0.0, 0.0]).inf_norm(torch.tensor(values[rank], dtype=torch.float64)).item()
    assert found == pytest.approx(want, rel=0, abs=0, nan_ok=True)
