"""Invalid windows are skipped on every replica, restore the optimizer's state, and read nothing."""

from __future__ import annotations

import pytest
import torch
from xla_cases import ACCUMULATE, OPTIMIZERS, Job, assert_near, device, reference, train, waves

import pyengine as pe

PLAN = [9, 9, 9, 9]


@pytest.mark.parametrize(
    ("world", "optimizer", "window"), [(1, "sgd", 0), (1, "adamw", 1), (2, "adamw", 0), (2, "sgd", 2)]
)
def test_inf_on_one_replica_skips_the_step_on_all_and_takes_the_state_back(
    replicas, world, optimizer, window
):
    job = Job(PLAN, optimizer, spoil=(world - 1, window * ACCUMULATE + 1))
    outcomes = replicas(world).run(train, job)
    expected = reference(job, world, without=[window])
    for outcome in outcomes:
        assert outcome.stepped == [index != window for index in range(3)]
        assert all(map(torch.equal, outcome.params, outcomes[0].params))
        assert all(map(torch.equal, outcome.state, outcomes[0].state))
        assert_near(outcome.params, expected)
        assert f"rank {world - 1}, micro-batch 1 (its loss)" in outcome.records[window].reason
        assert [record.skipped for record in outcome.records] == [not stepped for stepped in outcome.stepped]


def test_a_loss_scale_is_halved_on_every_replica_and_changes_nothing_else(replicas):
    plain = replicas(2).run(train, Job(PLAN, spoil=(0, 4)))
    scaled = replicas(2).run(train, Job(PLAN, spoil=(0, 4), scaler=True))
    for with_scaler, without in zip(scaled, plain, strict=True):
        assert with_scaler.scale == 2.0**9
        assert all(map(torch.equal, with_scaler.params, without.params))  # scales are powers of two


def _parameters(num: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(waves(5, phase=i).float().to(device())) for i in range(num)]


def _train_partly(rank: int, used_by: list[set[int]], optimizer: str):
    """Train replicas that use only some of four parameters; return the values and sizes of states of all."""
    params = _parameters(4)
    sync = pe.GradSync(params, accumulate=1)
    steps = OPTIMIZERS[optimizer](params, capturable=True)
    for step in range(3):
        with sync.accumulate():
            losses = [(params[i] * (i + step + 1)).sum() for i in sorted(used_by[rank])]
            sync.backward(torch.stack(losses).sum() if losses else params[0].sum() * 0)
            sync.step(steps)
    sync.synchronize()
    return [p.detach().cpu() for p in params], [len(steps.state[p]) for p in params]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_that_no_replica_uses_is_not_stepped(replicas, optimizer):
    """Weight decay alone would change it. A parameter that any replica uses is stepped on all replicas."""
    (params, states), (others, _) = replicas(2).run(_train_partly, [{0, 1}, {0, 2}], optimizer)
    assert all(map(torch.equal, params, others))
    kept = [torch.equal(param, waves(5, phase=i).float()) for i, param in enumerate(params)]
    assert kept == [False, False, False, True]
    assert states[3] == 0


def _use_later(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    params = _parameters(2)
    sync = pe.GradSync(params, accumulate=1)
    steps = OPTIMIZERS["adamw"](params, capturable=True)
    for used in ([0, 1], [0], [0, 1]):
        with sync.accumulate():
            sync.backward(torch.stack([(params[i] * (i + 2)).sum() for i in used]).sum())
            sync.step(steps)
    sync.synchronize()
    return params[1].detach().cpu(), steps.state[params[1]]["step"].cpu()


def test_a_parameter_left_out_for_a_window_keeps_value_and_state(replicas):
    ((value, step),) = replicas(1).run(_use_later)
    param = torch.nn.Parameter(waves(5, phase=1).float())
    twin = torch.optim.AdamW([param], lr=0.01)
    for _ in range(2):
        param.grad = torch.full((5,), 3.0)
        twin.step()
    assert step == 2
    assert torch.allclose(value, param.detach(), rtol=0, atol=1e-6)


def _two_optimizers(rank: int):
    params = _parameters(2)
    sync = pe.GradSync(params, accumulate=1)
    first, second = (torch.optim.SGD([param], lr=0.5, momentum=0.9) for param in params)
    for _ in range(3):
        with sync.accumulate():
            sync.backward((params[0] * 2 + params[1] * 3).sum())
            sync.step(first)
            sync.step(second)
    sync.synchronize()
    return [p.detach().cpu() for p in params]


def test_two_optimizers_share_a_window(replicas):
    (values,) = replicas(1).run(_two_optimizers)
    for index, (value, grad) in enumerate(zip(values, [2.0, 3.0], strict=True)):
        moved = 0.5 * grad * (1 + 1.9 + 2.71)
        assert torch.allclose(value, waves(5, phase=index).float() - moved, rtol=0, atol=1e-5)


def _step_twice(rank: int) -> None:
    (param,) = _parameters(1)
    sync = pe.GradSync([param], accumulate=1)
    steps = torch.optim.SGD([param], lr=0.5)
    with sync.accumulate():
        sync.backward(param.sum())
        sync.step(steps)
        with pytest.raises(RuntimeError, match="a step on this device consumes gradients. Use one opt"):
            sync.step(steps)


def test_a_second_step_over_the_same_gradients_is_refused(replicas):
    replicas(1).run(_step_twice)


def _raise(rank: int, job: Job) -> str:
    with pytest.raises(FloatingPointError) as caught:
        train(rank, job)
    return str(caught.value)


def test_the_policy_raise_names_the_parameter_and_the_micro_batch_on_every_replica(replicas):
    job = Job(PLAN, spoil=(1, 4), nonfinite="raise")
    for text in replicas(2).run(_raise, job):
        assert "window 1: inf or nan in the gradient of '0.weight'" in text
        assert "rank 1, micro-batch 1" in text
