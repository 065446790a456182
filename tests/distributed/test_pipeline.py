"""Schedules of torch.distributed.pipelining, which run in micro-batch blocks, against one float64 process."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from cases import assert_alike, me, records_of
from meshes import mesh_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

import pyengine as pe

ACCUMULATE, CHUNKS, ROWS, WIDTH, CLASSES = 2, 2, 4, 6, 3


def _layers(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number - 1)]
    return [*middle, nn.Linear(WIDTH, CLASSES)]


def _data(shard: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(shard)
    return [
        (
            torch.randn(ROWS, WIDTH, generator=generator),
            torch.randint(-1, CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(2 * ACCUMULATE)
    ]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over labels other than -1."""
    return cross_entropy(logits, labels, reduction="sum", ignore_index=-1)


def _count(labels: Tensor) -> int:
    return int((labels >= 0).sum())


def _in_one_process(
    model: nn.Module, shards: list[list[tuple[Tensor, Tensor]]]
) -> tuple[list[float], list[float]]:
    """Train a float64 model in place; return losses and norms by window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for start in range(0, 2 * ACCUMULATE, ACCUMULATE):
        data = [pair for shard in shards for pair in shard[start : start + ACCUMULATE]]
        loss = sum(_loss(model(x.double()), y) for x, y in data) / sum(_count(y) for _, y in data)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return losses, norms


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@pytest.mark.parametrize(
    ("schedule", "world", "is_marked", "scale", "options"),
    [
        ("gpipe", 2, False, None, {}),
        ("1f1b", 2, True, None, {}),
        ("gpipe", 2, False, 8.0, {}),
        ("1f1b", 2, True, 8.0, {}),
        ("gpipe", 4, True, None, {"accumulator": "exact"}),
        ("interleaved", 4, False, 8.0, {"accumulator": "exact"}),
    ],
)
@on_ranks()
def test_a_schedule_is_one_micro_batch_a_step(schedule, is_marked, scale, options):
    """Only the last stage knows losses and counts, and scales the losses."""
    dp = me()[1] // 2
    mesh = mesh_of(pp=2, dp=dp)
    rank, shard, group = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_group("pp")
    virtual = 2 if schedule == "interleaved" else 1
    layers = _layers(2 * virtual)
    whole = copy.deepcopy(nn.Sequential(*layers)).double()
    mine = nn.ModuleDict({str(i): layers[i] for i in range(rank, len(layers), 2)})
    stages = [
        PipelineStage(m, int(i), len(layers), torch.device("cpu"), group=group) for i, m in mine.items()
    ]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss = _loss(logits, labels)
        return loss if sync.scaler is None else sync.scaler.scale(loss)

    runner = SCHEDULES[schedule](
        stages if virtual > 1 else stages[0], CHUNKS, loss_fn=loss_of, scale_grads=False
    )
    axes = pe.Axes(replicate="dp", shard="pp")
    sync = pe.GradSync(mine, accumulate=ACCUMULATE, device_mesh=mesh, axes=axes, **options)
    sync.scaler = None if scale is None else pe.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    records = records_of(sync)
    norms = []
    for window in sync.windows(_data(shard)):
        for x, y in window:
            losses: list[Tensor] = []
            with sync.micro_batch() as mb:
                if rank == 1:
                    mb.count = _count(y)
                with mb.last_backward() if is_marked else nullcontext():
                    runner.step(x) if rank == 0 else runner.step(target=y, losses=losses)
                if rank == 1 and not is_marked:
                    mb.loss = torch.stack(losses).sum() / (scale or 1.0)
        norms.append(sync.clip_grad_norm_(0.5).item())
        sync.step(optimizer)
    want, want_norms = _in_one_process(whole, [_data(index) for index in range(dp)])
    torch.testing.assert_close(norms, want_norms, rtol=1e-5, atol=0)
    if not is_marked:
        torch.testing.assert_close([record.loss for record in records], want, rtol=1e-5, atol=0)
    assert [record.count for record in records] == [
        sum(_count(y) for s in range(dp) for _, y in _data(s)[k : k + ACCUMULATE]) for k in (0, ACCUMULATE)
    ]
    assert [record.micro_batches for record in records] == [dp * ACCUMULATE] * 2
    for name, param in mine.named_parameters():
        torch.testing.assert_close(param.double(), whole.get_parameter(name), rtol=1e-5, atol=1e-6)
    assert_alike([norms, [record.loss or 0.0 for record in records]])


@pytest.mark.parametrize("is_marked", [False, True])
@on_ranks(2)
def test_a_pipeline_in_which_no_rank_has_scaled_a_loss_is_refused_on_every_rank(is_marked):
    mesh = mesh_of(pp=2, dp=1)
    rank, layer = mesh.get_local_rank("pp"), nn.Linear(2, 2)
    sync = pe.GradSync([(f"stage{rank}", layer.weight)], device_mesh=mesh, axes=pe.Axes("dp", shard="pp"))
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0)
    with (
        pytest.raises(ValueError, match=r"call sync\.scaler\.scale\(loss\)\.backward\(\)"),
        sync.accumulate(),
    ):
        with sync.micro_batch(count=1) as mb, mb.last_backward() if is_marked else nullcontext():
            layer(torch.ones(1, 2)).sum().backward()
        sync.unscale_()
    sync.abandon()
