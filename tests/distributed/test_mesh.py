"""Meshes: tensor parallelism, experts and context parallelism, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import assert_alike, me, records_of
from meshes import (
    ACCUMULATE,
    ROWS,
    Block,
    Experts,
    Sequence,
    assert_resumes,
    assert_trained,
    count_of,
    cut,
    cut_sequence,
    in_one_process,
    loss_of,
    mesh_of,
    micro_batches,
    train,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _spoil(model: nn.Module, *, unless: bool) -> None:
    """Change a rank's values, which the engine must replace with those of its group."""
    with torch.no_grad():
        for param in () if unless else model.parameters():
            param.mul_(0.5)


def _expert_axes(mesh: DeviceMesh) -> dict[str, Any]:
    """Return options: sum gradients over all ranks, those of experts over ranks with the same expert."""
    return {"device_mesh": mesh, "axes": pe.Axes(replicate=("edp", "ep"), groups={"experts.*": "edp"})}


def _ddp_beside_experts(model: nn.Module) -> DistributedDataParallel:
    names = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model, bucket_cap_mb=1e-5)


MANY_BUCKETS = {"accumulator": "native", "wire": pe.wire.BF16(), "bucket_cap_mb": 1e-5}


@pytest.mark.parametrize(
    ("layers", "dtype", "options"),
    [
        (Block, torch.bfloat16, {}),
        (Block, torch.float32, {"accumulator": "exact"}),
        (Block, torch.float32, MANY_BUCKETS),
        (Sequence, torch.float32, {}),
    ],
    ids=["fp32", "exact", "native, bf16 wire, many buckets", "partial sums of a sequence"],
)
@on_ranks(4)
def test_data_times_tensor_parallelism_equals_one_process(layers, dtype, options):
    mesh, model = mesh_of(dp=2, tp=2), layers(dtype)
    shards = [micro_batches(shard, dtype) for shard in range(2)]
    want, norms = in_one_process(model, shards)
    (cut if layers is Block else cut_sequence)(model, mesh)
    shard = mesh.get_local_rank("dp")
    _spoil(model, unless=shard == 0)
    sync = pe.GradSync(
        model, accumulate=ACCUMULATE, device_mesh=mesh, axes=pe.Axes(replicate="dp"), **options
    )
    records = records_of(sync)
    found = train(model, sync, shards[shard])
    assert_trained(model, want, (found, norms), narrow="wire" in options)
    total = sum(count_of(x) for shard in shards for x in shard)
    assert sum(record.count for record in records) == total
    assert [record.micro_batches for record in records] == [2 * ACCUMULATE] * 2
    assert all(p.grad.placements == p.placements for p in model.parameters() if hasattr(p, "placements"))
    # A header, one bucket (an exact one takes two rounds) and the norm; clipping adds a header and the norm.
    rounds = 2 if options.get("accumulator") == "exact" else 1
    if layers is Block and "bucket_cap_mb" not in options:
        # The first window also exchanges the order of the buckets.
        assert [record.collectives for record in records] == [5 + rounds, 4 + rounds]


@pytest.mark.parametrize(
    ("dtype", "by"), [(torch.float32, "mesh"), (torch.bfloat16, "groups"), (torch.float32, "ddp")]
)
@on_ranks(4)
def test_experts_have_a_group_of_their_own(dtype, by):
    mesh = mesh_of(edp=2, ep=2)
    model = Experts(dtype)
    rank, world = me()
    shards = [micro_batches(shard, dtype) for shard in range(world)]
    want, norms = in_one_process(model, shards)
    mine = mesh.get_local_rank("ep")
    model.keep_one(mesh.get_group("ep"))
    wanted = want | {f"experts.0.{part}": want[f"experts.{mine}.{part}"] for part in ("weight", "bias")}
    _spoil(model, unless=rank == 0)
    with torch.no_grad():  # all ranks of an expert's group get the values of its first rank
        for part, param in model.experts[0].named_parameters():
            if mesh.get_local_rank("edp") == 0:
                param.copy_(Experts(dtype).experts[mine].get_parameter(part))
    how: dict[str, Any] = _expert_axes(mesh)
    if by == "groups":
        how = {"axes": pe.Axes(groups={"experts.*": mesh.get_group("edp")})}
    if by == "ddp":
        forward = _ddp_beside_experts(model)
        sync = pe.attach(forward, accumulate=ACCUMULATE, **how)
    else:
        forward, sync = model, pe.GradSync(model, accumulate=ACCUMULATE, bucket_cap_mb=1e-5, **how)
    assert_trained(model, wanted, (train(forward, sync, shards[rank]), norms))


@pytest.mark.parametrize(
    ("dtype", "counts"), [(torch.float32, "of the part"), (torch.bfloat16, "of the sequence")]
)
@on_ranks(4)
def test_parts_of_a_sequence_are_summed_and_the_divisor_counts_every_item_once(dtype, counts):
    mesh = mesh_of(dp=2, cp=2)
    model = Block(dtype)
    shards = [micro_batches(shard, dtype) for shard in range(2)]
    want, norms = in_one_process(model, shards)
    axes = pe.Axes(replicate=("dp", "cp"), count="dp" if counts == "of the sequence" else None)
    sync = pe.GradSync(model, accumulate=ACCUMULATE, device_mesh=mesh, axes=axes)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    half = slice(0, ROWS // 2) if mesh.get_local_rank("cp") == 0 else slice(ROWS // 2, ROWS)
    for window in sync.windows(shards[mesh.get_local_rank("dp")]):
        for x in window:
            count = count_of(x if counts == "of the sequence" else x[half])
            sync.backward(loss_of(model, x[half]), count=torch.tensor(count))
        found.append(sync.clip_grad_norm_(0.1).item())
        sync.step(optimizer)
    assert_trained(model, want, (found, norms))


class _Both(nn.ModuleList):
    """Stages that run side by side, and whose losses add up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([stage(x) for stage in self], 1)


class _Shared(nn.Module):
    """A stage with parameters of its own, and two that the other stage has too, in the opposite order."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.factor = 1 + stage
        for name in [["all", "a", "b", "pair"], ["pair", "c", "d", "all"]][stage]:
            setattr(self, name, nn.Parameter(torch.ones(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(param * x).sum() for param in self.parameters()]).sum() * self.factor


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(4)
def test_groups_of_ranks_with_parameters_of_other_names_never_wait_for_each_other(accumulator):
    """The groups overlap, and the stages launch the buckets in opposite orders."""
    mesh = mesh_of(pp=2, dp=2)
    stage, shard = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = _Shared(stage)
    axes = pe.Axes(replicate="dp", shard="pp", groups={"all": ("pp", "dp"), "pair": "pp"})
    sync = pe.GradSync(
        model, accumulate=2, accumulator=accumulator, bucket_cap_mb=1e-6, device_mesh=mesh, axes=axes
    )
    data = [torch.full((2, 3), 1.0 + shard + 2 * k) for k in range(6)]
    for number, window in enumerate(sync.windows(data)):
        for x in window:
            sync.backward(model(x), count=2)
        norm = sync.grad_norm().item()
        sync.unscale_()
        sums = [[2.0 * 2 * (1 + s + 4 * number) + 4 for _ in range(3)] for s in range(2)]  # of x, by shard
        by_shard = torch.tensor(sums)
        want = {
            "all": 3 * by_shard.sum(0),
            "pair": 3 * by_shard[shard],
            **dict.fromkeys("abcd", model.factor * by_shard.sum(0)),
        }
        for name, param in model.named_parameters():
            assert torch.equal(param.grad, want[name] / 8), name
        parts = [want["all"], *(3 * by_shard), *(f * by_shard.sum(0) for f in (1, 1, 2, 2))]
        assert norm == pytest.approx((torch.cat(parts) / 8).norm().item(), rel=1e-6)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert_alike(norm)


@on_ranks(3)
def test_ranks_with_unequal_numbers_of_experts_cut_what_they_share_alike():
    rank, world = me()
    numel = 3 * 2**16  # the second such parameter closes the first bucket
    model = nn.ModuleDict(
        {
            "dense": nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(3)),
            "experts": nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(1 + rank)),
        }
    )
    sync = pe.GradSync(model, **_expert_axes(mesh_of(edp=1, ep=world)))
    with sync.accumulate():
        sync.backward(sum((param * (rank + 1.0)).sum() for param in model.parameters()), count=1)
    sync.unscale_()
    for name, param in model.named_parameters():
        want = sum(range(1, world + 1)) if name.startswith("dense.") else rank + 1
        assert torch.all(param.grad == want / world), name


@on_ranks(4)
def test_what_is_not_finite_in_one_group_is_skipped_in_all_of_them():
    rank, _ = me()
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "experts": nn.Linear(2, 2)})
    sync = pe.GradSync(model, **_expert_axes(mesh_of(edp=2, ep=2)))
    for window in sync.windows([torch.ones(1, 2)]):
        for x in window:
            weight = torch.inf if rank == 3 else 1.0
            sync.backward(model["dense"](x).sum() + (model["experts"](x) * weight).sum().clamp(max=1.0))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert sync.last_record.skipped
    reason = sync.last_record.reason
    assert "'experts.weight'" in reason and "rank 3" not in reason.split("from")[0]


@on_ranks(4)
def test_a_run_on_a_mesh_resumes_in_mid_window():
    mesh = mesh_of(dp=2, tp=2)

    def make() -> tuple[pe.Sync, nn.Module]:
        model = cut(Block(torch.float32), mesh)
        axes = pe.Axes(replicate="dp")
        return pe.GradSync(model, accumulate=ACCUMULATE, device_mesh=mesh, axes=axes), model

    assert_resumes(make, micro_batches(mesh.get_local_rank("dp"), torch.float32))


@on_ranks(4)
def test_counts_read_ahead_count_once_a_batch():
    mesh, model = mesh_of(dp=2, tp=2), nn.Linear(3, 1, bias=False)
    sync = pe.GradSync(model, accumulate=2, device_mesh=mesh, axes=pe.Axes(replicate="dp"))
    rows = 1 + mesh.get_local_rank("dp")
    for window in sync.windows([torch.ones(rows, 3)] * 2, count=len):
        for x in window:
            sync.backward(model(x).sum())
        sync.unscale_()
    assert (next(iter(sync.totals.values())), model.weight.grad[0, 0].item()) == (6.0, 1.0)


@on_ranks(4)
def test_elements_of_all_parts_are_measured_and_clipped():
    """The inf norm is over all parts, and clipping by value changes the elements of all parts."""
    mesh, model, twin = mesh_of(dp=2, tp=2), Block(torch.float32), Block(torch.float64)
    x = torch.linspace(-1, 1, ROWS * 6).reshape(ROWS, 6)
    (loss_of(twin, x.double()) / ROWS).backward()
    cut(model, mesh)
    sync = pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(replicate="dp"))
    for window in sync.windows([x]):
        for x in window:
            sync.backward(loss_of(model, x), count=ROWS)
        found = [sync.clip_grad_norm_(1e6, norm_type=float("inf")).item()]
        sync.clip_grad_value_(found[0] / 4)
        found.append(sync.grad_norm().item())
        sync.unscale_()
    largest = max(p.grad.abs().max().item() for p in twin.parameters())
    clipped = torch.cat([p.grad.clamp(-largest / 4, largest / 4).flatten() for p in twin.parameters()])
    torch.testing.assert_close(found, [largest, clipped.norm().item()], rtol=1e-5, atol=0)
    assert_alike(found)


@on_ranks(4)
def test_gradients_kept_on_a_mesh_count_once():
    """Gradients that the caller does not clear are added to the next window, and to its norm."""
    mesh = mesh_of(dp=2, tp=2)
    model = cut(Block(torch.float32), mesh)
    sync = pe.GradSync(model, accumulate=1, device_mesh=mesh, axes=pe.Axes(replicate="dp"))
    norms = []
    for window in sync.windows([torch.ones(ROWS, 6)] * 2):
        for x in window:
            sync.backward(loss_of(model, x), count=ROWS)
        norms.append(sync.grad_norm().item())
        sync.unscale_()
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)
    assert_alike(norms[1])


@pytest.mark.parametrize(
    ("kind", "dtype", "what"),
    [
        ("own", torch.float32, "stages"),
        ("attach", torch.float32, "stages"),
        ("attach", torch.bfloat16, "the same batch"),
    ],
)
@on_ranks(4)
def test_stages_hold_other_parameters_and_share_norm_and_clip_factor(kind, dtype, what):
    """In the case "the same batch", ranks along the other axis have the same batch and parameters."""
    mesh = mesh_of(dp=2, other=2)
    stages = [Block(dtype), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)]
    shards = [micro_batches(shard, dtype) for shard in range(2)]
    stage = mesh.get_local_rank("other") if what == "stages" else 0
    want, norms = in_one_process(_Both(stages) if what == "stages" else stages[0], shards)
    model = stages[stage]
    axes = pe.Axes(replicate="dp", shard="other" if what == "stages" else ())
    options: Any = {"accumulate": ACCUMULATE, "device_mesh": mesh, "axes": axes}
    if kind == "own":
        forward, sync = model, pe.GradSync(model, **options)
    else:
        forward = DistributedDataParallel(model, process_group=mesh.get_group("dp"), bucket_cap_mb=1e-5)
        sync = pe.attach(forward, **options)
    records = records_of(sync)
    found = train(forward, sync, shards[mesh.get_local_rank("dp")])
    mine = {name.removeprefix(f"{stage}."): value for name, value in want.items()}
    assert_trained(model, mine, (found, norms))
    assert [record.micro_batches for record in records] == [2 * ACCUMULATE] * 2
    # The header and the norm, in addition to the buckets.
    assert all(record.collectives > 2 + (what == "stages") for record in records)


@on_ranks(4)
def test_later_engines_use_the_groups_of_axes_that_earlier_ones_have_made():
    how, numbers = _expert_axes(mesh_of(edp=2, ep=2)), set()
    for is_ddp in [False] * 3 + [True] * 3:
        model = nn.ModuleDict({"shared": nn.Linear(2, 2), "experts": nn.ModuleList([nn.Linear(2, 2)])})
        sync = pe.attach(_ddp_beside_experts(model), **how) if is_ddp else pe.GradSync(model, **how)
        sync.close()
        numbers.add(len(dist.distributed_c10d._world.pg_map))
    assert len(numbers) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [{"dp": 2, "cp": 2}, {"dp": 1, "cp": 4}], ids=["2 x 2", "1 x 4"])
@on_ranks(4)
def test_parts_of_ranks_that_share_a_batch_never_overflow(accumulate, shape):
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(
        model,
        accumulate=accumulate,
        accumulator="exact",
        device_mesh=mesh_of(**shape),
        axes=pe.Axes(replicate=("dp", "cp"), count="dp"),
    )
    for exponent in range(-10, 30, 5):
        for mantissa in (1.0, 1.75):  # a tie between two integers of the grid, and what fills one
            x = mantissa * 2.0**exponent
            for window in sync.windows([torch.full((1, 1), x)] * accumulate):
                for batch in window:
                    sync.backward(model(batch).sum())
                sync.unscale_()
                assert float(model.weight.grad) == x * shape["cp"], x
                sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
