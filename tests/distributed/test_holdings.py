"""The norm over ranks that hold different elements: each element once, the same bits on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from cases import me

from pyengine.comm import comm_for
from pyengine.window.final_pass import FinalPass, Holdings

CPU = torch.device("cpu")


def _shard_sum(shard: int) -> list[float]:
    """Return sums of squares of two parameters, whose sums depend on their order."""
    return [0.1 * (shard + 1), 1e16 / 3**shard]


def _final(counted: list[bool]) -> FinalPass:
    return FinalPass(2, CPU, Holdings(counted, comm_for(CPU, None), CPU))


def _norm_over_shards(num_shards: int) -> float:
    """Shard `rank % num_shards` of two parameters, held by the ranks that leave the same remainder."""
    rank, _ = me()
    final = _final([rank < num_shards] * 2)
    final.sumsq.copy_(torch.tensor(_shard_sum(rank % num_shards), dtype=torch.float64))
    final.compute_norm()
    assert not final.found_inf
    return final.grad_norm().item()


def _by_hand(num_shards: int) -> float:
    return math.sqrt(sum(sum(_shard_sum(shard)) for shard in range(num_shards)))


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_norm_has_the_same_bits_on_every_rank_and_however_many_replicas_there_are(ranks, num_shards):
    norms = [
        norm for world in range(num_shards, 5) for norm in ranks(world).run(_norm_over_shards, num_shards)
    ]
    assert norms == [_by_hand(num_shards)] * len(norms)


def _replicas_and_shards() -> float:
    """A parameter that all ranks hold, and a shard on every rank."""
    rank, _ = me()
    final = _final([rank == 0, True])
    final.sumsq.copy_(torch.tensor([9.0, 4.0 * rank]))
    final.compute_norm()
    return final.grad_norm().item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_replica_counts_once_and_every_shard_too(ranks, world):
    norm = math.sqrt(9 + sum(4.0 * rank for rank in range(world)))
    assert ranks(world).run(_replicas_and_shards) == [norm] * world


def _broken(what: str) -> tuple[bool, float]:
    rank, world = me()
    final = _final([rank == 0, rank == 0])
    final.sumsq.copy_(torch.tensor([1.0, 2.0]))
    if rank == world - 1 and what == "void":
        final.void = torch.tensor(math.nan)
    elif rank == world - 1:
        final.sumsq[1] = float(what)
    final.compute_norm()
    return bool(final.found_inf), final.grad_norm().item()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("what", ["void", "inf", "nan"])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all_counted_or_not(ranks, world, what):
    assert all(skips for skips, _ in ranks(world).run(_broken, what))


def _norm_of_changed() -> float:
    """Gradients of one rank are changed behind a clipping."""
    rank, _ = me()
    final = _final([rank == 0, True])
    final.sumsq.copy_(torch.tensor([9.0, 16.0]))
    final.compute_norm()
    assert final.clip(math.sqrt(41) / 2, final.grad_norm()).item() == pytest.approx(0.5)
    if rank:
        final.sumsq.copy_(torch.tensor([9.0, 4.0]))
    final.renew_norm(was_read=rank == 1)
    return final.grad_norm().item()


def test_a_norm_that_is_computed_again_counts_what_one_rank_has_changed(ranks):
    assert ranks(2).run(_norm_of_changed) == pytest.approx([math.sqrt(25 / 4 + 4)] * 2, rel=1e-6)


def _refused() -> float:
    final = _final([True, True])
    final.sumsq.fill_(2.0)
    if me()[0] == 0:  # the other rank runs another engine's window: nothing may follow its header
        final.compute_norm(is_refused=True)
    return final.grad_norm().item() if me()[0] == 0 else 2.0


def test_nothing_is_exchanged_behind_a_header_in_which_ranks_disagree(ranks):
    assert ranks(2).run(_refused) == [2.0, 2.0]


def _largest(values: list[float]) -> float:
    """The inf-norm over ranks that hold different elements."""
    rank, _ = me()
    return _final([True, True]).inf_norm(torch.tensor(values[rank], dtype=torch.float64)).item()


@pytest.mark.parametrize(
    "values", [[1.0, 8.0, 2.0], [0.0, 0.0, 0.0], [1.0, math.inf, 2.0], [1.0, math.nan, math.inf]], ids=str
)
def test_the_largest_value_of_any_rank_counts_and_nan_stays_nan(ranks, values):
    want = math.nan if any(map(math.isnan, values)) else max(values)
    assert ranks(3).run(_largest, values) == pytest.approx([want] * 3, rel=0, abs=0, nan_ok=True)
