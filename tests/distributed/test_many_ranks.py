"""What grows with the number of ranks: nothing that a rank sends for making an engine, nor for a window."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import nn

import pyengine as pe
from pyengine.comm import TorchDist
from pyengine.gradients.used_anywhere import UsedAnywhere

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KINDS = ["engine", "attach"]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return benchmarks/bench_ranks.py, which ranks can import, too."""
    if not BENCHMARKS.exists():
        pytest.skip("the sdist has no benchmarks")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_ranks")


def _counted(kind: str) -> tuple[dict[str, tuple[int, int]], int]:
    """Return what this rank has counted, and the collectives of making by gloo's own numbers."""
    bench, launched = importlib.import_module("bench_ranks"), []
    with mock.patch.object(bench.torch.optim, "SGD", wraps=torch.optim.SGD) as made:
        made.side_effect = lambda *_, **__: launched.append(bench.rounds()) or mock.DEFAULT
        before = bench.rounds()
        found = bench.count_traffic(kind)
    return found, launched[0] - before


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_accounted_traffic_is_what_ranks_count(ranks, bench, kind, world):
    ddps = {"engine": 0, "attach": 3}[kind]  # of making the DDP
    for rank, (found, launched) in enumerate(ranks(world).run(_counted, kind)):
        assert found == bench.account(kind, world, rank)
        assert found["making"][0] == launched - ddps


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_4096_sends_as_much_as_one_of_64(bench, kind):
    few, many = bench.account(kind, 64), bench.account(kind, 4096)
    for part, (collectives, num_bytes) in few.items():
        assert many[part][0] == collectives
        assert num_bytes <= many[part][1] <= 1.02 * num_bytes  # 2 (W - 1) / W grows by 1.6 %


@on_ranks(3)
def test_several_values_are_compared_in_one_collective():
    rank, _ = me()
    comm = TorchDist(None, CPU)
    (same, places), largest = comm.all_gather_objects([{"of": 3}, "same"], rank, -rank)
    assert (same, places, largest) == ([{"of": 3}] * 3, ["same"] * 3, [2, 0])
    assert comm.traffic.collectives == 1
    (same, places), largest = comm.all_gather_objects([{"of": 3}, "x" * rank], rank)
    assert (same, places, largest) == ([{"of": 3}] * 3, ["", "x", "xx"], [2])


@on_ranks(2)
def test_flags_of_more_parameters_than_a_word_has_bits_name_those_that_no_rank_has_used():
    params = [nn.Parameter(torch.ones(1)) for _ in range(70)]
    for param in params:
        param.grad = torch.ones(1)
    used = [{0, 63, 68}, {0, 64}][me()[0]]
    flags = UsedAnywhere(TorchDist(None, CPU), CPU).all_reduce([index in used for index in range(70)])
    assert flags.drop_unused(params) == [index for index in range(70) if index not in (0, 63, 64, 68)]


def _counts_ahead() -> int:
    """Return the bytes that this rank sends for a window whose counts are read ahead."""
    model = nn.Linear(4, 1)
    sync = pe.GradSync(model, accumulate=2)
    windows = sync.windows([torch.ones(3, 4)] * 6, count=len)
    for _ in range(3):
        before = sync._engine.comm.traffic.bytes_sent
        for x in next(windows):
            sync.backward(model(x).sum())
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    return sync._engine.comm.traffic.bytes_sent - before


def test_counting_ahead_sends_as_much_on_more_ranks(ranks):
    *_, of_three = ranks(3).run(_counts_ahead)
    *_, of_four = ranks(4).run(_counts_ahead)
    assert of_three == of_four
