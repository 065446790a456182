"""Real replicas train as float64 does on the global batch, and end with the same bits as one another."""

from __future__ import annotations

import pytest
import torch
from xla_cases import OPTIMIZERS, PLANS, Job, reference, train

# Unit roundoff of float32 is 6e-8; a parameter of size 0.3 takes a few dozen roundings in at most three steps.
TOLERANCE = 1e-6


def _check(outcomes, expected):
    for param, right in zip(outcomes[0].params, expected, strict=True):
        assert torch.allclose(param.double(), right, rtol=0, atol=TOLERANCE), (
            (param.double() - right).abs().max()
        )
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0].params, other.params))
        assert all(map(torch.equal, outcomes[0].state, other.state))
        assert other.norms == outcomes[0].norms


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_equal_float64_on_the_global_batch(replicas, world, plan, optimizer):
    job = Job(PLANS[plan], optimizer)
    _check(replicas(world).run(train, job), reference(job, world))
