"""XLA replicas train like float64 on the global batch, and all replicas have the same bits."""

from __future__ import annotations

import pytest
import torch
from xla_cases import ACCUMULATE, PLANS, Job, assert_near, device, reference, train

import pyengine as pe


def _check(outcomes, expected, tolerance=1e-6):
    assert_near(outcomes[0].params, expected, tolerance)
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0].params, other.params))
        assert all(map(torch.equal, outcomes[0].state, other.state))
        assert other.norms == outcomes[0].norms


@pytest.mark.parametrize(
    ("world", "job"),
    [
        (1, Job(PLANS["short last window"], "adamw")),
        *((2, Job(plan)) for plan in PLANS.values()),
        (2, Job(PLANS["unequal"], tensor_counts=True)),
        (4, Job(PLANS["one rank has nothing"], "adamw")),
    ],
)
def test_replicas_equal_float64_on_the_global_batch(replicas, world, job):
    _check(replicas(world).run(train, job), reference(job, world))


# bfloat16 and float16 have 8 and 11 significant bits. Gradients are about 1, and parameters about 0.3 after
# up to three steps with a learning rate of 0.05.
@pytest.mark.parametrize(
    ("job", "tolerance"),
    [
        (Job(PLANS["equal"], wire=pe.wire.FP16()), 2e-4),
        (Job(PLANS["equal"], dtype=torch.bfloat16), 2e-2),
        (Job(PLANS["equal"], dtype=torch.float16), 2e-3),
    ],
    ids=["fp16 wire", "bf16 parameters", "fp16 parameters"],
)
def test_narrow_types_stay_near_float64_and_equal_on_both_replicas(replicas, job, tolerance):
    _check(replicas(2).run(train, job), reference(job, 2), tolerance)


def _integers(here: torch.device) -> tuple[torch.Tensor, list[float]]:
    """Train on small integers, whose sums are exact, with counts that sum to a power of two."""
    param = torch.nn.Parameter(torch.arange(7.0).to(here))
    sync = pe.GradSync([param], accumulate=ACCUMULATE)
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.5)
    norms = []
    for window in sync.windows(range(5)):
        for index in window:
            factors = torch.tensor([index - 2.0, 1, -3, 0, 2, 4, 1])
            sync.backward((param * factors.to(here)).sum(), count=[1, 2, 1, 3, 5][index])
        norms.append(sync.clip_grad_norm_(100.0))
        sync.step(optimizer)
    return param.detach().cpu(), [float(norm) for norm in norms]


def _integers_here(rank: int) -> tuple[torch.Tensor, list[float]]:
    return _integers(device())


def test_a_single_replica_equals_the_cpu_engine_bit_for_bit_on_integers(replicas):
    ((param, norms),) = replicas(1).run(_integers_here)
    expected, expected_norms = _integers(torch.device("cpu"))
    assert torch.equal(param, expected)
    assert norms == expected_norms


def _bf16_sums_keep_growing(rank: int) -> float:
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16).to(device()))
    sync = pe.GradSync([param], accumulate=300)
    for window in sync.windows(range(300)):
        for _ in window:
            sync.backward(param.sum().float())
        sync.unscale_()
    return param.grad.item()


def test_bf16_gradients_do_not_stop_growing(replicas):
    assert replicas(1).run(_bf16_sums_keep_growing) == [1.0]  # 300 / 300; a sum in bf16 stops at 256


def _in_gaps(rank: int) -> list[torch.Tensor]:
    """Return gradients of parameters whose memory has gaps, or is not in the order of their shape."""
    views = (
        lambda big: big[0, :3, :6].t(),
        lambda big: big[:3, :5, :4].permute(2, 0, 1),
        lambda big: big[0, :, 3],
    )
    params = [torch.nn.Parameter(view(torch.zeros(8, 8, 8).to(device()))) for view in views]
    sync = pe.GradSync(params, accumulate=1)
    with sync.accumulate():
        numbers = [torch.arange(float(p.numel())).view(p.shape).to(device()) for p in params]
        loss = sum((p * each).sum() for p, each in zip(params, numbers, strict=True))
        sync.backward(loss * (1 + 2 * rank))
        sync.unscale_()
    return [param.grad.cpu() for param in params]


def test_gradients_have_the_order_of_the_shape_where_memory_has_gaps(replicas):
    for grads in replicas(2).run(_in_gaps):
        for grad in grads:
            assert torch.equal(grad, 2.0 * torch.arange(float(grad.numel())).view(grad.shape))
