"""Setting `sync.gradient_accumulation_steps` between windows: the loop's next window has this length."""

from __future__ import annotations

import pytest
import torch
from cases import Integers, assert_same, engine, grads, integers, me, mean_of_integers
from ranks import on_ranks
from sharded_cases import batch, loss_of, own_batches, right_grads, sharded, whole_grads

import pyengine as pe

SIZES = [1, 3, 2]  # and a short last window
NUM = sum(SIZES) + 1


@pytest.mark.parametrize(("world", "kind"), [(1, "own"), (2, "own"), (3, "attach")])
@on_ranks()
def test_a_loop_goes_on_with_windows_of_the_new_length(kind):
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=SIZES[0])
    seen = 0
    for number, window in enumerate(sync.windows([integers(100 * rank + k) for k in range(NUM)])):
        places = range(seen, seen := min(seen + [*SIZES, 2][number], NUM))
        for x, t in window:
            sync.backward(forward(x, t), count=3)
        sync.unscale_()
        batches = [integers(100 * r + k) for r in range(world) for k in places]
        assert_same(grads(model), mean_of_integers(model, batches, 3 * len(batches)))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
        sync.gradient_accumulation_steps = [*SIZES, 2, 2][number + 1]
    assert (seen, sync.window) == (NUM, len(SIZES) + 1)


@on_ranks(2)
def test_a_loop_over_a_sharded_model_does_too():
    sync, model = sharded("flat", accumulate=1)
    for window in sync.windows(own_batches(4)):
        model.zero_grad()
        length = len([sync.backward(loss_of(model, data), count=3) for data in window])
        sync.unscale_()
        sync.gradient_accumulation_steps = 3
    _, world = me()
    rest = [batch(100 * rank + k) for rank in range(world) for k in (1, 2, 3)]
    assert length == 3
    assert_same(whole_grads(model), right_grads(rest, 3 * len(rest)))


@on_ranks(2)
def test_a_state_does_not_contain_the_length():
    model = torch.nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    sync.gradient_accumulation_steps = 4
    state = sync.state_dict()
    sync.close()
    other = pe.GradSync(model, accumulate=2)
    other.load_state_dict(state)
    assert other.gradient_accumulation_steps == 2


@pytest.mark.parametrize("kind", ["own", "sharded"])
@on_ranks(2)
def test_another_length_on_some_rank_is_an_error_on_every_rank(kind):
    rank, _ = me()
    sync, model = sharded("flat", accumulate=1) if kind == "sharded" else (None, torch.nn.Linear(5, 3))
    sync = sync or pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync.gradient_accumulation_steps = 1 + rank
    with pytest.raises(RuntimeError, match="Set sync.gradient_accumulation_steps to the same") as error:
        for window in sync.windows(own_batches(2)):
            for x, _ in window:
                sync.backward(model(x).sum(), count=3)
            sync.step(optimizer)
    assert "rank 0: 2 micro-batches over all ranks; rank 1: 4 micro-batches" in str(error.value)
    sync.abandon()
    sync.gradient_accumulation_steps = 2
    for window in sync.windows(own_batches(2)):
        for x, _ in window:
            sync.backward(model(x).sum(), count=3)
        assert sync.step(optimizer)
