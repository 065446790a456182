"""Accelerate with even_batches=False: a flat loop cannot wait for other ranks and is refused; `sync.windows`
replaces it.
"""

from __future__ import annotations

import pytest
import torch
from test_accelerate_windows import accelerated, loader
from worlds import CLOSE, Remembering, Weights, mean_of_windows, refusal

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator, DataLoaderConfiguration

from pyengine.adapters.accelerate import prepare

ACCUMULATE = 2


def _uneven() -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))


def _refusal(case: str) -> str:
    with accelerated():
        accelerator = _uneven()
        data = loader(2 * 3)
        if case == "prepared before":
            data = accelerator.prepare(data)
            accelerator.even_batches = True
        if case == "skipped":
            data = accelerator.skip_first_batches(accelerator.prepare(data), 1)
        return refusal(lambda: prepare(accelerator, Weights(), data, accumulate=ACCUMULATE))


@pytest.mark.parametrize("case", ["bare", "prepared before", "skipped"])
def test_a_loader_that_ends_at_different_places_is_refused_on_every_rank(ranks, case):
    for message in ranks(2).run(_refusal, case):
        assert "even_batches=False" in message and "accelerator.sync.windows(loader)" in message


def test_one_process_has_nobody_to_wait_for(ranks):
    assert ranks(1).run(_refusal, "bare") == ["nothing was refused"]


def _over_windows(num: int) -> tuple:
    """Train over `sync.windows`, as the error message advises."""
    with accelerated():
        own = _uneven()
        module = Weights()
        memory = Remembering(module)
        accelerator, model, optimizer = prepare(own, module, memory, accumulate=ACCUMULATE)
        seen = []
        for window in accelerator.sync.windows(own.prepare(loader(num))):
            for (x,) in window:
                seen.append(x)
                accelerator.backward(model(x).sum(), count=len(x))
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
        return seen, memory.stepped_with


@pytest.mark.parametrize("num", [2 * 3, 2 * 5 - 1, 2 * 9])
@pytest.mark.parametrize("world", [2, 3])
def test_windows_over_such_a_loader_take_the_mean_over_the_items_there_are(ranks, world, num):
    answers = ranks(world).run(_over_windows, num)
    assert sum(len(x) for seen, _ in answers for x in seen) == num
    expected = mean_of_windows([seen for seen, _ in answers], ACCUMULATE)
    for _, grads in answers:
        torch.testing.assert_close(grads, expected, **CLOSE)
