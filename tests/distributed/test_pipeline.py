"""Schedules of torch.distributed.pipelining, whose backwards run in blocks, against one float64 process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
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
    """Return the sum over labels that are not -1."""
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
    ("schedule", "world", "is_marked", "options"),
    [
        ("gpipe", 2, False, {}),
        ("1f1b", 2, True, {}),
        ("gpipe", 4, True, {"accumulator": "exact"}),
        ("interleaved", 4, False, {"accumulator": "exact"}),
    ],
)
@on_ranks()
def test_a_schedule_is_one_micro_batch_a_step(schedule, is_marked, options):
    """Only the last stage knows losses and counts."""
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
    runner = SCHEDULES[schedule](
        stages if virtual > 1 else stages[0], CHUNKS, loss_fn=_loss, scale_grads=False
    )
    axes = pe.Axes(replicate="dp", shard="pp")
    sync = pe.GradSync(mine, accumulate=ACCUMULATE, device_mesh=mesh, axes=axes, **options)
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
                    mb.loss = torch.stack(losses).sum()
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


class _Stage:
    """A stage whose schedule is two calls: a forward, and a backward of what came from the next stage."""

    def __init__(self, mine: nn.Module, sync: pe.Sync, group: object, scales_at: Sequence[int]) -> None:
        self.mine, self.sync, self.scales_at = mine, sync, scales_at
        self.ranks = dist.get_process_group_ranks(group)
        self.place = self.ranks.index(dist.get_rank())

    def run(self, x: Tensor, last: int) -> None:
        """Run the stages up to the rank at place `last`, whose loss is the sum of its output."""
        if self.place:
            dist.recv(x, src=self.ranks[self.place - 1])
            x.requires_grad_()
        out = self.mine(x)
        if self.place == last:
            loss = out.sum()
            (self.sync.scaler.scale(loss) if self.place in self.scales_at else loss).backward()
        else:
            dist.send(out.detach(), dst=self.ranks[self.place + 1])
            grad = torch.empty_like(out)
            dist.recv(grad, src=self.ranks[self.place + 1])
            out.backward(grad)
        if self.place:
            dist.send(x.grad, dst=self.ranks[self.place - 1])


def _staged(
    dp: int, scales_at: dict[int, tuple[int, ...]], *, is_marked: bool, rows: Sequence[int]
) -> list[Tensor]:
    """Train a window of a pipeline under a loss scale; return the mean gradients of this rank's stage."""
    mesh = mesh_of(pp=me()[1] // dp, dp=dp)
    shard, stages = mesh.get_local_rank("dp"), me()[1] // dp
    mine = nn.Linear(2, 2, bias=False)
    nn.init.ones_(mine.weight)
    axes = pe.Axes(replicate="dp", shard="pp")
    sync = pe.GradSync(mine, accumulate=2, device_mesh=mesh, axes=axes)
    sync.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    stage = _Stage(mine, sync, mesh.get_group("pp"), scales_at[shard])
    for window in sync.windows(range(rows[shard])):
        for _ in window:
            with sync.micro_batch() as mb, mb.last_backward() if is_marked else nullcontext():
                stage.run(torch.ones(1, 2), last=stages - 1)
        assert sync.step(torch.optim.SGD(mine.parameters(), lr=0.0))
    assert sync.scaler.get_scale() == 16.0
    return [param.grad for param in mine.parameters()]


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize(("world", "dp", "rows"), [(2, 1, [2]), (3, 1, [1]), (4, 2, [2, 1]), (4, 2, [0, 2])])
@on_ranks()
def test_stages_without_a_loss_get_gradients_that_are_scaled(dp, rows, is_marked):
    stages = me()[1] // dp
    place = mesh_of(pp=stages, dp=dp).get_local_rank("pp")
    (grad,) = _staged(dp, dict.fromkeys(range(dp), (stages - 1,)), is_marked=is_marked, rows=rows)
    assert torch.equal(grad, torch.full((2, 2), 2.0**place * 2.0 ** (stages - 1 - place)))


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize(
    ("world", "dp", "scales_at"), [(2, 1, {0: ()}), (4, 2, {0: (1,), 1: ()}), (4, 2, {0: (), 1: ()})]
)
@on_ranks()
def test_losses_that_no_stage_of_a_batch_has_scaled_are_refused_on_every_rank(dp, scales_at, is_marked):
    with pytest.raises(
        ValueError, match=r"call sync\.scaler\.scale.*the losses of micro-batch 0 were not scaled"
    ):
        _staged(dp, scales_at, is_marked=is_marked, rows=[2] * dp)
