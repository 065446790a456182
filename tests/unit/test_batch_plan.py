"""A global batch on any number of workers: shares, remainders, learning rates, warm-up."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LRScheduler, StepLR

import pyengine as pe

# --- plan_batch ---


def test_accumulate_times_micro_batch_times_ranks_is_the_global_batch():
    plan = pe.plan_batch(global_batch=256, micro_batch=8, world_size=4)
    assert (plan.accumulate, plan.shares) == (8, (8, 8, 8, 8))
    assert (plan.micro_batches, plan.idle) == (32, 0)


@pytest.mark.parametrize("micro_batches", [5, 12, 125])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_shares_are_what_window_sampler_deals(world_size, micro_batches):
    plan = pe.plan_batch(global_batch=8 * micro_batches, micro_batch=8, world_size=world_size, uneven=True)
    sampler = pe.WindowSampler(10**4, seed=0, micro_batch=8, global_batch=8 * micro_batches)
    ranks = [sampler.shard(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert plan.shares == tuple(rank.accumulate for rank in ranks)
    assert sum(plan.shares) == plan.micro_batches == micro_batches
    assert max(plan.shares) - min(plan.shares) == (micro_batches % world_size > 0)
    assert plan.idle == -micro_batches % world_size


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "world_size", "message"),
    [
        (1000, 8, 64, "= 512; nearest are 512 and 1024, or split its 125 micro-batches with uneven=True"),
        (1000, 16, 32, "= 512; nearest are 512 and 1024"),  # 1000 / 16 leaves a remainder too
        (100, 8, 64, "= 512; nearest is 512"),
        (8, 8, 64, "= 512; nearest is 512"),  # some ranks would have no micro-batch
        (513, 1, 512, "= 512; nearest are 512 and 1024, or split its 513 micro-batches with uneven=True"),
    ],
)
def test_a_batch_that_does_not_come_out_even_names_the_nearest(
    global_batch, micro_batch, world_size, message
):
    want = f"global_batch={global_batch} is not a multiple of micro_batch × world_size {message}"
    with pytest.raises(ValueError, match=f"^{re.escape(want)}$"):
        pe.plan_batch(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)


# --- steps_per_epoch ---


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("dataset_size", "drop_last", "steps"),
    [(960, False, 10), (961, False, 11), (961, True, 10), (959, True, 9)],
)
def test_steps_per_epoch_are_the_samplers_windows_for_every_world_size(
    dataset_size, drop_last, steps, world_size
):
    plan = pe.plan_batch(global_batch=96, micro_batch=8, world_size=world_size)
    sampler = pe.WindowSampler(dataset_size, seed=1, micro_batch=8, global_batch=96, drop_last=drop_last)
    assert plan.steps_per_epoch(dataset_size, drop_last=drop_last) == sampler.num_windows == steps


# --- scale_lr ---


@pytest.mark.parametrize(
    ("rule", "to_batch", "lr"),
    [("linear", 1024, 2.0), ("sqrt", 1024, 1.0), ("linear", 64, 0.125), ("sqrt", 64, 0.25)],
)
def test_learning_rate_follows_the_rule_up_and_down(rule, to_batch, lr):
    assert pe.scale_lr(0.5, from_batch=256, to_batch=to_batch, rule=rule) == lr


def test_a_ratio_beyond_what_papers_show_warns_at_the_caller_s_line():
    with pytest.warns(
        UserWarning, match=r"^to_batch=8448 is 33 × from_batch=256; the papers behind the rules"
    ) as caught:
        pe.scale_lr(0.1, from_batch=256, to_batch=8448, rule="sqrt")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(("from_batch", "to_batch"), [(256, 8192), (8448, 256)])
def test_a_ratio_within_what_papers_show_gives_no_warning(from_batch, to_batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pe.scale_lr(0.1, from_batch=from_batch, to_batch=to_batch, rule="linear")


# --- warm_up ---

LR, STEPS, AFTER = 0.5, 8, 6
SCHEDULERS = {
    "constant": (lambda optimizer: ConstantLR(optimizer, factor=1.0), lambda step: LR),
    "cosine": (
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=AFTER),
        lambda step: LR * (1 + math.cos(math.pi * step / AFTER)) / 2,
    ),
    "lambda": (
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda step: LR / (1 + step),
    ),
}


def optimizer_and(make) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=LR)
    return optimizer, pe.warm_up(make(optimizer), steps=STEPS, start_factor=0.25)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_rises_in_a_line_and_then_follows_the_scheduler_from_its_beginning(name):
    make, after = SCHEDULERS[name]
    optimizer, scheduler = optimizer_and(make)
    used = []
    for _ in range(STEPS + AFTER):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    line = [LR * (0.25 + 0.75 * step / STEPS) for step in range(STEPS)]
    # LinearLR multiplies step by step: a few roundings of 2**-53 each.
    assert used == pytest.approx(line + [after(step) for step in range(AFTER)], rel=1e-14)


def test_a_scheduler_goes_on_from_its_state_in_the_middle_of_the_warm_up():
    make, _ = SCHEDULERS["cosine"]
    optimizer, scheduler = optimizer_and(make)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    other, resumed = optimizer_and(make)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for _ in range(STEPS):
        optimizer.step(), scheduler.step(), other.step(), resumed.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# --- Wrong arguments ---


def uneven(**changes) -> pe.BatchPlan:
    return pe.plan_batch(**{"global_batch": 64, "micro_batch": 16, "world_size": 2, "uneven": True} | changes)


def scale(lr=0.1, **changes) -> float:
    return pe.scale_lr(lr, **{"from_batch": 256, "to_batch": 512, "rule": "linear"} | changes)


def warm(**changes) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=LR)
    return pe.warm_up(StepLR(optimizer, 1), **{"steps": 1, "start_factor": 1.0} | changes)


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        (uneven, {"global_batch": 1000}, ValueError, "global_batch=1000 is not a multiple of micro_batch=16"),
        (uneven, {"world_size": 5}, ValueError, "world_size=5 .* only 4 of the ranks .* at most 4"),
        (uneven, {"world_size": 0}, ValueError, "world_size=0: expected a whole number of at least 1"),
        (uneven, {"micro_batch": 0}, ValueError, "micro_batch=0: expected a whole number of at least 1"),
        (uneven, {"global_batch": 0}, ValueError, "global_batch=0: expected a whole number of at least 1"),
        (uneven, {"world_size": 2.0}, TypeError, "world_size=2.0 is a float"),
        (scale, {"rule": "cube"}, ValueError, "rule='cube': expected 'linear' .* or 'sqrt'"),
        (scale, {"lr": 0}, ValueError, "lr=0: expected a finite number above 0"),
        (scale, {"lr": math.nan}, ValueError, "lr=nan: expected"),
        (scale, {"lr": "0.1"}, TypeError, "lr='0.1' is a str: expected a number"),
        (scale, {"from_batch": 0}, ValueError, "from_batch=0: expected a whole number of at least 1"),
        (scale, {"to_batch": 1.5}, TypeError, "to_batch=1.5 is a float"),
        (warm, {"steps": 0}, ValueError, "steps=0: expected a whole number of at least 1"),
        (warm, {"steps": 1.5}, TypeError, "steps=1.5 is a float"),
        (warm, {"start_factor": 0}, ValueError, "start_factor=0: expected a number above 0 and at most 1"),
        (warm, {"start_factor": 2}, ValueError, "start_factor=2: expected"),
    ],
)
def test_a_bad_argument_is_named(call, changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(**changes)


def test_what_a_plan_cannot_answer_is_refused():
    plan = pe.plan_batch(global_batch=1000, micro_batch=8, world_size=64, uneven=True)
    with pytest.raises(ValueError, match=r"^accumulate: ranks have 1 or 2 .* use shares\[rank\]"):
        _ = plan.accumulate
    with pytest.raises(ValueError, match="dataset_size=999 gives no window of global_batch=1000"):
        plan.steps_per_epoch(999, drop_last=True)
