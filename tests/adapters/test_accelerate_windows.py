"""Accelerate's own loop with pyengine's `prepare`: correct gradients where Accelerate's are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from worlds import CLOSE, Remembering, Weights, items, launched, mean_of_windows

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

import accelerate
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from pyengine.adapters.accelerate import prepare

ACCUMULATE = 4


@contextmanager
def accelerated() -> Iterator[None]:
    """Allow Accelerate in a rank of the pool, and reset its process-wide state afterwards."""
    with launched():
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def loader(num: int) -> DataLoader:
    return DataLoader(TensorDataset(items(num)), batch_size=2)


def prepared(accelerator: Accelerator, num: int, accumulate: int) -> tuple:
    """Return an optimizer that records its gradients, and all objects prepared with it for `num` items."""
    memory = Remembering(model := Weights())
    return memory, *prepare(accelerator, model, memory, loader(num), accumulate=accumulate)


def loop(accelerator, model, optimizer, loader, *, epochs=1):
    """Train as in Accelerate's guide to gradient accumulation; return the micro-batches of this rank."""
    seen = []
    for _ in range(epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                seen.append(x)
                loss = model(x).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return seen


def _alone(num: int) -> tuple:
    with accelerated():
        model = Weights()
        memory = Remembering(model)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        model, optimizer, data = accelerator.prepare(model, memory, loader(num))
        return loop(accelerator, model, optimizer, data), memory.stepped_with


def _with_windows(num: int, epochs: int = 1) -> tuple:
    with accelerated():
        own = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        memory, accelerator, model, optimizer, data = prepared(own, num, ACCUMULATE)
        return loop(accelerator, model, optimizer, data, epochs=epochs), memory.stepped_with


def _expected(answers: list[tuple]) -> list[torch.Tensor]:
    return mean_of_windows([seen for seen, _ in answers], ACCUMULATE)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 5, 7])
def test_every_window_steps_with_the_mean_over_its_own_items(ranks, world, micro_batches):
    answers = ranks(world).run(_with_windows, 2 * world * micro_batches)
    for _, grads in answers:
        torch.testing.assert_close(grads, _expected(answers), **CLOSE)


def test_one_process_without_a_group_steps_alike():
    answer = _with_windows(2 * 5)
    torch.testing.assert_close(answer[1], _expected([answer]), **CLOSE)


def test_accelerate_alone_shrinks_the_short_last_window(ranks):
    answers = ranks(2).run(_alone, 2 * 2 * 5)
    (full, short), expected = answers[0][1], _expected(answers)
    torch.testing.assert_close(full, expected[0], **CLOSE)
    torch.testing.assert_close(short, expected[1] / ACCUMULATE, **CLOSE)


def test_windows_do_not_run_on_into_the_next_epoch(ranks):
    answers = ranks(2).run(_with_windows, 2 * 2 * 5, epochs=2)
    epoch = mean_of_windows([seen[:5] for seen, _ in answers], ACCUMULATE)
    torch.testing.assert_close(answers[0][1], epoch * 2, **CLOSE)


def _summed_losses() -> tuple:
    """Keep one or two items of each micro-batch, by its index and the rank, so that counts differ."""
    with accelerated():
        seen = []
        memory, accelerator, model, optimizer, data = prepared(Accelerator(cpu=True), 20, ACCUMULATE)
        for place, (x,) in enumerate(data):
            kept = x[: 1 + (place + accelerator.process_index) % 2]
            with accelerator.accumulate(model):
                seen.append(kept)
                accelerator.backward(model(kept).sum(), count=len(kept))
                optimizer.step()
                optimizer.zero_grad()
        return seen, memory.stepped_with


def test_summed_losses_with_counts_give_the_mean_over_items(ranks):
    answers = ranks(2).run(_summed_losses)
    torch.testing.assert_close(answers[0][1], _expected(answers), **CLOSE)


def _validate_and_break() -> int:
    with accelerated():
        memory, accelerator, model, optimizer, data = prepared(Accelerator(cpu=True), 2 * 2 * 5, ACCUMULATE)
        validation = accelerator.prepare(loader(40))
        for (x,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
            for _ in validation:
                break
        return len(memory.stepped_with)


def test_a_validation_loop_that_was_left_does_not_hide_the_end_of_the_data(ranks):
    assert ranks(2).run(_validate_and_break) == [2, 2]


def _resumed() -> tuple:
    """Skip the first window of an epoch, as after a restart, then train another epoch."""
    with accelerated():
        memory, accelerator, model, optimizer, data = prepared(Accelerator(cpu=True), 2 * 2 * 5, 2)
        rest = accelerator.skip_first_batches(data, 2)
        seen = [*loop(accelerator, model, optimizer, rest), *loop(accelerator, model, optimizer, data)]
        return seen, memory.stepped_with


def test_the_last_window_of_a_resumed_epoch_is_short_as_well(ranks):
    answers = ranks(2).run(_resumed)
    parts = [mean_of_windows([seen[p] for seen, _ in answers], 2) for p in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(answers[0][1], parts[0] + parts[1], **CLOSE)


def _prepared_alone(how: str) -> tuple:
    with accelerated():
        memory = Remembering(model := Weights())
        accelerator, evaluated = prepare(Accelerator(cpu=True), loader(6), accumulate=ACCUMULATE)
        model = accelerator.prepare_model(model) if how == "model" else accelerator.prepare(model)
        optimizer = accelerator.prepare(memory)
        data = accelerator.prepare_data_loader(loader(2 * 2 * 5))
        for _ in evaluated:
            break
        skipped = accelerate.skip_first_batches(data, 4)
        seen = loop(accelerator, model, optimizer, data, epochs=2)
        if how == "skipped":
            seen += loop(accelerator, model, optimizer, skipped, epochs=2)
        return seen, memory.stepped_with


@pytest.mark.parametrize("how", ["loader", "model", "skipped"])
def test_what_is_prepared_by_the_accelerators_other_calls_ends_windows(ranks, how):
    answers = ranks(2).run(_prepared_alone, how)
    parts = [slice(0, 5), slice(5, 10)] + [slice(10, 11), slice(11, 12)] * (how == "skipped")
    expected = [grad for part in parts for grad in mean_of_windows([s[part] for s, _ in answers], ACCUMULATE)]
    torch.testing.assert_close(answers[0][1], expected, **CLOSE)


def _teacher() -> bool:
    with accelerated():
        _, accelerator, model, *_ = prepared(Accelerator(cpu=True), 20, ACCUMULATE)
        teacher = accelerator.prepare_model(Weights(), evaluation_mode=True)
        return type(teacher) is Weights and teacher is not model


def test_a_model_for_evaluation_is_prepared_as_by_accelerate(ranks):
    assert ranks(2).run(_teacher) == [True, True]


def _states() -> tuple:
    with accelerated():
        _, accelerator, model, optimizer, data = prepared(Accelerator(cpu=True), 2 * 2 * 5, ACCUMULATE)
        found = []
        for (x,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                state = accelerator.gradient_state
                found.append((state.sync_gradients, state.end_of_dataloader, state.num_steps))
                optimizer.step()
        return found


def test_the_gradient_state_reports_the_windows(ranks):
    ends = [False, False, False, True, True]
    assert ranks(2).run(_states)[0] == [(end, i == 4, ACCUMULATE) for i, end in enumerate(ends)]
