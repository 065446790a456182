"""What is recorded, compiled and executed: two programs, one reduction per window, no reads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from xla_cases import FP32, OPTIMIZERS, device, loss_sum, micro_batch, mlp

import pyengine as pe
from pyengine.comm import comm_for

# The replicas of one process are its threads and share its counters; they wait for each other here.
MEETINGS = {world: threading.Barrier(world, timeout=60) for world in (1, 2)}


@dataclass
class Counts:
    """What torch_xla has done so far, in all replicas of this process."""

    compiled: int
    executed: int
    read: int
    recorded: int  # operations, on which the host spends its time


def _counts() -> Counts:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    xm.wait_device_ops()  # an execution is counted when it begins
    names = ("ExecuteTime", "TransferFromDeviceTime", "LazyTracing")
    found = [data[0] if (data := met.metric_data(name)) else 0 for name in names]
    return Counts(met.counter_value("UncachedCompile") or 0, *found)


@dataclass(frozen=True)
class Kind:
    """What is trained; each width has its own programs."""

    optimizer: str = "sgd"
    wire: pe.wire.Wire = FP32
    dtype: torch.dtype = torch.float32
    width: int = 16


def _train(rank: int, lengths: Sequence[int], kind: Kind) -> list[Counts]:
    """Train windows of these lengths; return the counts of each window."""
    here = device()
    model = mlp(kind.dtype, width=kind.width).to(here)
    sync = pe.GradSync(model, accumulate=5, wire=kind.wire)
    optimizer = OPTIMIZERS[kind.optimizer](model.parameters(), capturable=True)
    costs = []
    for length in lengths:
        pairs = [micro_batch(rank, 2 * i) for i in range(length)]  # all of one shape
        batches = [[t.to(here, kind.dtype) for t in pair] for pair in pairs]
        before = _counts()
        for index, batch in enumerate(batches, start=1):
            with sync.accumulate(last=index == length):
                sync.backward(loss_sum(model, *batch).float(), count=len(batch[0]) + rank)
                if index == length:
                    sync.clip_grad_norm_(0.5)
                    sync.step(optimizer)
        after = _counts()
        costs.append(Counts(*(now - then for now, then in zip(astuple(after), astuple(before), strict=True))))
    MEETINGS[sync._engine.comm.world_size].wait()  # `synchronize` reads; no window of any replica counts it
    sync.synchronize()
    return costs


@pytest.mark.parametrize(("optimizer", "most"), [("sgd", 276), ("adamw", 396)])
def test_windows_of_any_length_run_programs_that_are_there_and_read_nothing(replicas, optimizer, most):
    (costs,) = replicas(1).run(_train, [3, 3, 2, 3, 1, 5], Kind(optimizer))
    # Micro-batch; reduction; first step, which creates state; update.
    assert costs[0].compiled + costs[1].compiled <= 4
    steady = costs[2:]
    assert [cost.compiled for cost in steady] == [0] * 4
    assert [cost.executed for cost in steady] == [3, 4, 2, 6]  # one per micro-batch, and the update
    assert [cost.read for cost in steady] == [0] * 4
    of_a_micro_batch = steady[1].recorded - steady[0].recorded
    assert of_a_micro_batch <= 50
    assert steady[0].recorded - 2 * of_a_micro_batch <= most


def _runs_on_meta(rank: int) -> tuple[int, int, int]:
    """Return how often in-place operations have run in Python to infer a shape (on meta tensors).

    The counts are taken after one micro-batch, after two, and after `add_`.
    """
    del rank
    import torch._meta_registrations as meta

    runs, before = [0], meta.check_inplace_broadcast

    def counted(*args: Any) -> Any:
        runs[0] += 1
        return before(*args)

    here = device()
    model = mlp(width=16).to(here)
    sync = pe.GradSync(model, accumulate=3)
    batch = [t.to(here, torch.float32) for t in micro_batch(0, 0)]
    total = torch.zeros(3).to(here)
    meta.check_inplace_broadcast, found = counted, []
    try:
        for _ in range(2):
            with sync.accumulate():
                sync.backward(loss_sum(model, *batch), count=1)
            found.append(runs[0])
        total.add_(total)
    finally:
        meta.check_inplace_broadcast = before
    sync.abandon()
    return found[0], found[1], runs[0]


def test_a_micro_batch_runs_nothing_on_tensors_without_memory(replicas):
    assert replicas(1).run(_runs_on_meta) == [(0, 0, 1)]


def test_the_steady_step_path_of_two_replicas_reads_nothing_from_the_device(replicas):
    costs = replicas(2).run(_train, [2, 2, 2, 2], Kind("adamw"))
    assert [cost.read for cost in costs[0][2:]] == [0, 0]


def _collectives(programs: Iterable[Path]) -> list[int]:
    """Return the number of collectives in each program, in the order in which programs were compiled."""
    collective = re.compile(
        r"= .*\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(-start)?\("
    )
    return [len(collective.findall(path.read_text())) for path in sorted(programs)]


@pytest.mark.parametrize(
    ("kind", "of_an_update"),
    [
        (Kind(width=17), 1),
        (Kind(width=18, dtype=torch.bfloat16), 1),
        (Kind(width=19, wire=pe.wire.FP16()), 2),
    ],
    ids=["fp32", "bf16 parameters", "fp16 wire"],
)
def test_a_micro_batch_has_no_collective_and_an_update_one_for_each_type(replicas, kind, of_an_update):
    pair = replicas(2)
    pair.run(_train, [], kind)
    before = pair.programs()
    pair.run(_train, [2, 2, 2], kind)
    # The micro-batch, the first reduction, the first step, the update. Both replicas compile the programs
    # without a collective, at the same time.
    assert _collectives(pair.programs() - before) == [0, 0, of_an_update, 0, 0, of_an_update]


def _gather(rank: int, length: int) -> list[str]:
    return comm_for(device(), None).all_gather_object(f"{rank}" * (length + rank))


def test_objects_of_any_size_reach_every_replica_by_few_programs(replicas):
    assert replicas(4).run(_gather, 5) == [["0" * 5, "1" * 6, "2" * 7, "3" * 8]] * 4
    pair = replicas(2)
    pair.run(_gather, 5)
    before = pair.programs()
    for length in (0, 6, 500, 901):
        assert pair.run(_gather, length) == [["0" * length, "1" * (length + 1)]] * 2
    assert _collectives(pair.programs() - before) == []
    assert pair.run(_gather, 5000)[0] == ["0" * 5000, "1" * 5001]
