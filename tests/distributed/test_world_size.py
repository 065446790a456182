"""WindowSampler, micro_batch_rng and the engine together give the same result for every world size."""

from __future__ import annotations

import pytest
import torch
from cases import Integers, engine, integers
from torch.nn.functional import dropout

import pyengine as pe

SAMPLES = 50  # micro-batches of 3 samples, 2 or 4 per window; the last window has one of 2 samples


def _train(kind: str, micro_batches: int) -> list[tuple[torch.Tensor, int]]:
    """Return (all gradients, count) of every window; integers over a count are exact in any order."""
    x, t = integers(0, SAMPLES)
    model = Integers(torch.float32)
    sampler = pe.WindowSampler(SAMPLES, seed=42, micro_batch=3, global_batch=3 * micro_batches)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_sampler=sampler)
    sync, forward = engine(kind, model, accumulate=sampler.accumulate)
    optimizer, records, found = torch.optim.SGD(model.parameters(), lr=0.0), [], []
    sync.on_step(records.append)
    for step, window in enumerate(sync.windows(loader)):
        for index, (x, t) in enumerate(window, start=sampler.first):
            with pe.micro_batch_rng(42, step=step, index=index):
                sync.backward(forward(dropout(x, 0.5), t), count=len(x))
        sync.unscale_()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        sync.step(optimizer)
    return [(grads, record.count) for grads, record in zip(found, records, strict=True)]


@pytest.mark.parametrize(("kind", "micro_batches", "world"), [("own", 4, 3), ("attach", 4, 2), ("own", 2, 4)])
def test_every_window_has_the_gradient_of_a_single_rank(ranks, kind, micro_batches, world):
    (alone,) = ranks(1).run(_train, kind, micro_batches)
    assert [count for _, count in alone] == [3 * micro_batches] * (SAMPLES // (3 * micro_batches)) + [2]
    for windows in ranks(world).run(_train, kind, micro_batches):
        assert [count for _, count in windows] == [count for _, count in alone]
        assert torch.equal(torch.stack([g for g, _ in windows]), torch.stack([g for g, _ in alone]))
