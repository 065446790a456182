"""Other modes of torch_xla: SPMD, and a real reduction of one replica."""

from __future__ import annotations

import torch
from xla_cases import PLANS, Job, assert_near, device, loss_sum, mlp, reference, train, waves

import pyengine as pe


def _train_spmd(rank: int) -> tuple[list[torch.Tensor], int]:
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(2), (2,), ("data",))
    here = device()
    model = mlp().to(here)
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for window in sync.windows(range(4)):
        for index in window:
            x, y = (tensor.to(here) for tensor in _batch(index))
            for tensor in (x, y):
                xs.mark_sharding(tensor, mesh, ("data", None))
            sync.backward(loss_sum(model, x, y), count=4)
        sync.step(optimizer)
    return [param.detach().cpu() for param in model.parameters()], sync._engine.comm.world_size


def _batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return waves(4, 6, phase=10 * index).float(), waves(4, 3, phase=50 + 10 * index).float()


def test_under_spmd_the_compiler_reduces_and_nothing_is_averaged_again(replicas):
    ((params, world_size),) = replicas(1, CPU_NUM_DEVICES="2", XLA_USE_SPMD="1").run(_train_spmd)
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for window in range(2):
        optimizer.zero_grad()
        for index in (2 * window, 2 * window + 1):
            x, y = _batch(index)
            (loss_sum(model, x.double(), y.double()) / 8).backward()
        optimizer.step()
    assert world_size == 1
    assert_near(params, [param.detach() for param in model.parameters()])


def test_one_replica_that_really_reduces_changes_nothing(replicas):
    job = Job(PLANS["short last window"])
    alone = replicas(1, XLA_ALWAYS_ALLREDUCE="1")
    (outcome,) = alone.run(train, job)
    (plain,) = replicas(1).run(train, job)
    assert all(map(torch.equal, outcome.params, plain.params))
    assert_near(outcome.params, reference(job, 1))
    assert any("all-reduce(" in path.read_text() for path in alone.programs())
