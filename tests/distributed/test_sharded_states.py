"""States of windows over FSDP2 in which ranks have done, or have left, different numbers of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from cases import assert_same, error_of, me
from ranks import on_ranks
from sharded_cases import (
    Chain,
    all_batches,
    batch,
    loss_of,
    own_batches,
    right_grads,
    sharded,
    whole_grads,
    windows_of,
)
from torch import Tensor, nn

import pyengine as pe

# Accumulate and micro-batches by rank, and how many are handed out in the last window before it is saved.
NUMBERS = {
    "equal": ([3] * 4, [3] * 4, 2),
    "unequal accumulate": ([3, 1], [3, 1], 2),
    "unequal accumulate, more data": ([3, 1], [6, 2], 2),
    "has run out": ([3, 3], [6, 3], 2),
    "runs out behind the state": ([3, 3], [6, 4], 1),
}


@pytest.mark.parametrize(
    ("case", "kind", "world", "options"),
    [
        ("equal", "flat", 3, {}),
        ("equal", "hsdp", 4, {"narrow": True, "nonfinite": "raise"}),
        ("equal", "nested", 2, {"narrow": True, "accumulator": "native"}),  # sums are wider than gradients
        ("equal", "nested", 2, {"nonfinite": "drop_micro_batch"}),  # sums beside `.grad`
        ("unequal accumulate", "nested", 2, {}),
        ("unequal accumulate, more data", "replicate", 2, {"accumulator": "exact"}),
        ("has run out", "nested", 2, {"nonfinite": "raise"}),
        ("runs out behind the state", "nested", 2, {}),
    ],
    ids=str,
)
@on_ranks()
def test_a_window_goes_on_where_ranks_have_done_any_numbers(case, kind, options):
    """Save in the last window, go on with another engine, and save and load once more before that."""
    rank, world = me()
    accumulate, numbers, stop = NUMBERS[case]
    accumulate, numbers = accumulate[:world], numbers[:world]
    sync, model = sharded(kind, accumulate=accumulate[rank], **options)
    done, last, state = 0, -(-max(numbers) // max(accumulate)) - 1, None
    for index, window in enumerate(sync.windows(own_batches(numbers[rank]))):
        for number, data in enumerate(window, start=1):
            sync.backward(loss_of(model, data), count=3)
            done += not sync.is_padding
            if index == last and number == stop:
                state = sync.state_dict()
                break
        if state is not None:
            break
        sync.unscale_()
        model.zero_grad()
    sync.close()
    sync, model = sharded(kind, accumulate=accumulate[rank], **options)
    sync.load_state_dict(state)
    again = sync.state_dict()
    sync.abandon()
    assert again.keys() == state.keys()
    sync.load_state_dict(again)
    assert sync.window == last
    next(windows_of(sync, model, own_batches(numbers[rank])[done:]))
    sync.unscale_()
    batches = [
        batch(100 * r + number)
        for r, (steps, total) in enumerate(zip(accumulate, numbers, strict=True))
        for number in range(last * steps, min(total, (last + 1) * steps))
    ]
    assert_same(whole_grads(model), right_grads(batches, 3 * len(batches)))


@pytest.mark.parametrize("accumulator", ["fp32", "native", "exact"])
@on_ranks(2)
def test_what_only_backwards_before_the_state_have_used_keeps_its_gradient(accumulator):
    sync, model = sharded("nested", accumulate=2, accumulator=accumulator)
    first, second = own_batches(2)
    window = next(sync.windows([first, second]))
    sync.backward(loss_of(model, next(window), extra=True), count=3)
    state = sync.state_dict()
    sync.close()
    sync, model = sharded("nested", accumulate=2, accumulator=accumulator)
    sync.load_state_dict(state)
    next(windows_of(sync, model, [second]))
    sync.unscale_()
    extras, rest = all_batches([2, 2])[::2], all_batches([2, 2])[1::2]
    assert_same(whole_grads(model), right_grads(rest, 12, extras=extras))


class _Unpicklable:
    """A batch that no other rank can get."""

    def __init__(self, rank: int) -> None:
        self.data = batch(rank)

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


@pytest.mark.parametrize("can", [True, False])
@on_ranks(2)
def test_a_rank_without_any_batch_pads_with_a_copy_of_another_one_s(can):
    rank, _ = me()
    sync, model = sharded("nested")
    own: list[Any] = own_batches(3) if can else [_Unpicklable(0)]
    try:
        for window in sync.windows([] if rank else own):
            for data in window:
                assert sync.is_padding == (rank == 1)
                sync.backward(loss_of(model, data if can else data.data), count=3)
            sync.unscale_()
    except ValueError as error:
        assert not can
        assert str(error).startswith("rank 1 has no micro-batch at all, and needs a copy of another one's")
        return
    assert can
    assert_same(whole_grads(model), right_grads([batch(number) for number in range(3)], 9))


def _kept(model: nn.Module, sync: pe.Sync) -> dict[str, Any]:
    """Return a state with gradients that no optimizer has used."""
    for _ in windows_of(sync, model, own_batches(3)):
        sync.unscale_()
    return sync.state_dict()


def _shards(model: nn.Module) -> dict[str, Tensor | None]:
    """Return this rank's own parts of the gradients."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else grad.to_local().clone() for name, grad in grads.items()}


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_gradients_that_no_optimizer_has_used_are_each_rank_s_own_also_in_a_list(accumulator):
    sync, model = sharded("nested", accumulate=3, accumulator=accumulator)
    state = _kept(model, sync)
    want = _shards(model)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state)
    for given in (state, states):
        model.zero_grad()
        sync.load_state_dict(given)
        assert_same(_shards(model), want)


@pytest.mark.parametrize("origin", ["nested", "hsdp", "whole"])
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(4)
def test_gradients_that_no_optimizer_has_used_need_as_many_ranks(accumulator, origin):
    group = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(2)][me()[0] // 2]
    options = {"accumulate": 3, "accumulator": accumulator}
    if accumulator == "exact":
        options["accumulator"] = pe.Exact(micro_batches=12)
    states: list[Any] = [None] * 2
    if origin == "whole":  # of two ranks, whose gradients are not sharded
        model: nn.Module = Chain()
        sync: pe.Sync = pe.GradSync(model, process_group=group, **options)
        dist.all_gather_object(states, _kept(model, sync), group=group)
        sync, model = sharded("nested", **options)
    else:
        sync, model = sharded(origin, **options)
        states = [None] * 4
        dist.all_gather_object(states, _kept(model, sync))
        model = Chain()
        sync = pe.GradSync(model, process_group=group, **options)
    message = error_of(sync.load_state_dict, states)
    assert "step every optimizer, or set .grad to None, before sync.state_dict(), or start as many" in message
