"""What the examples claim is true on real ranks; `train` is what an example's main block runs."""

from __future__ import annotations

import any_launcher
import attach
import captured_windows
import ddp_hook
import fp16_scaler
import global_batch
import grad_sync
import out_of_memory
import pytest
import token_counts
import uneven_data
import wrap_unnested
from marks import rest


@pytest.mark.parametrize("example", [grad_sync, attach], ids=lambda example: example.__name__)
def test_the_loss_falls_and_every_rank_hears_the_same_one(ranks, example):
    first, second = ranks(2).run(example.train)
    assert first == second
    assert len(first) == example.WINDOWS
    assert first[-1] < first[0] - 0.5


def test_windows_that_a_gpu_would_capture_train_without_one():
    losses = captured_windows.train("cpu")
    assert len(losses) == captured_windows.WINDOWS
    assert sum(losses[-5:]) < sum(losses[:5]) - 1


def test_the_hook_alone_finds_the_weights_on_every_rank(ranks):
    first, second = ranks(2).run(ddp_hook.train)
    assert first == second
    assert first == pytest.approx([1, 2, 3, 4], abs=0.01)


def test_a_mean_over_tokens_does_not_depend_on_who_has_which_sequence(ranks):
    # Gradients below 1, summed from 60 terms in another order: 60 roundings of 2^-24.
    assert max(ranks(2).run(token_counts.train)) < 60 * 2**-24


def test_ranks_that_have_run_out_of_data_wait_for_nobody(ranks):
    assert ranks(2).run(uneven_data.train) == [[(7, 7), (4, 4), (2, 2)]] * 2


def test_a_rank_without_memory_finds_the_size_that_fits_and_trains_the_same(ranks):
    (size, failures, far), (fits, retries, far_too) = ranks(2).run(out_of_memory.train)
    assert (size, failures) == (None, 0)
    assert (fits, retries) == (4, 3)  # 32, 16, 8
    # Ten steps from weights and gradients below 8: 64 terms of fp32, rounded in another order.
    assert max(far, far_too) < 10 * 64 * 2**-22


def test_the_wrapped_optimizer_steps_once_a_window_and_its_scheduler_with_it(ranks):
    assert ranks(2).run(wrap_unnested.train) == [(6, 0.5**6)] * 2


def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks):
    first, second = ranks(2).run(fp16_scaler.train)
    assert first == second
    assert [skipped for skipped, _, _ in first] == [False, False, True, False]
    assert [scale for _, _, scale in first] == [1024, 1024, 512, 512]
    assert "from rank 1" in first[fp16_scaler.BAD_STEP][1]


def test_the_schedule_does_not_depend_on_the_number_of_workers(ranks):
    (alone, rates), *_ = ranks(1).run(global_batch.train)
    results = ranks(2).run(global_batch.train)
    assert alone == 12
    assert results == [(6, rates)] * 2


@pytest.mark.parametrize("world", [2, *rest(4)])
def test_every_number_of_workers_trains_the_same_parameters(ranks, world):
    assert set(ranks(world).run(any_launcher.train)) == set(ranks(1).run(any_launcher.train))
