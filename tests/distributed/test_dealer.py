"""Windows dealt out to whoever is free: every micro-batch once, the same bits, and less for a slow rank."""

from __future__ import annotations

import time

import pytest
import torch
from cases import me
from exact_cases import Gpt, digest
from ranks import on_ranks
from torch import nn

import pyengine as pe

SAMPLES, MICRO_BATCHES = 21, 12  # the last window is short


def _train(slow: int) -> tuple[list[str], list[list[int]]]:
    """Train; return digests and the micro-batches that this rank has taken. One rank is slow."""
    rank, _ = me()
    torch.manual_seed(0)
    model = Gpt(torch.float32)
    data = torch.randint(0, 50, (SAMPLES, 9))
    sampler = pe.WindowSampler(SAMPLES, seed=7, micro_batch=1, global_batch=MICRO_BATCHES)
    exact = pe.Exact(micro_batches=MICRO_BATCHES)
    sync = pe.GradSync(model, accumulate=MICRO_BATCHES, accumulator=exact, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests, taken = [], []
    for step, window in enumerate(sync.windows(pe.Dealer(sampler))):
        taken.append([])
        for index, rows in window:
            taken[-1].append(index)
            if rank == slow:
                time.sleep(0.03)
            with pe.micro_batch_rng(7, step=step, index=index):
                sync.backward(model(data[rows]), count=8 * len(rows))
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        digests.append(digest(*model.parameters()))
    return digests, taken


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_micro_batch_is_computed_once_and_the_bits_are_those_of_one_rank(ranks, world):
    ((alone, _),) = ranks(1).run(_train, -1)
    results = ranks(world).run(_train, world - 1)
    for number, size in enumerate([12, 9]):
        assert sorted(index for _, taken in results for index in taken[number]) == list(range(size))
    for digests, _ in results:
        assert digests == alone
    if world == 2:
        fast, slow = (sum(map(len, taken)) for _, taken in results)
        assert slow < fast


@on_ranks(2)
def test_an_engine_that_could_not_take_all_of_a_dealt_window_is_refused():
    sampler = pe.WindowSampler(8, seed=0, micro_batch=1, global_batch=4)
    sync = pe.GradSync(nn.Linear(2, 1), accumulate=2)
    with pytest.raises(ValueError) as error:
        next(sync.windows(pe.Dealer(sampler)))
    assert "accumulate=2 with a Dealer of 4 micro-batches" in str(error.value)
