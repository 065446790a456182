"""A wrong mesh, group or axis is an error on every rank, and no rank hangs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import me, typed_error_of
from meshes import Block, Experts, mesh_of
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

DP = pe.Axes(replicate="dp")


WRONG = {
    "no such axis": "axes.replicate='data': not an axis of device_mesh, which has 'dp' (2), 'tp' (2)",
    "no such axis on one rank": "ValueError: rank 2: axes.replicate='data'",
    "no replicas": "axes.replicate names none",
    "replicas and shards": "'dp' is in both replicate and shard",
    "an axis twice": "an axis is named twice",
    "no such count": "axes.count='cp'",
    "no such group": "axes.groups['*']='ep'",
    "no such parameter": "axes.groups['expert.*'] matches no parameter on any rank",
    "other axes": "ranks have different meshes or axes",
    "no axes": "axes is a str: expected a pe.Axes",
    "both": "process_group and device_mesh were both given",
    "no mesh": "device_mesh is a str: expected a torch.distributed.device_mesh.DeviceMesh",
    "axes without a mesh": "without device_mesh: only a mesh has axes",
    "names without a mesh": "axes.groups['up.*']='dp': expected a torch.distributed.ProcessGroup",
    "outside": "which is not in the engine's process group",
    "other groups": "sums gradients over ranks",
    "other sizes": "ranks have different meshes or axes",
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(4)
def test_wrong_axes_groups_and_meshes_are_refused_on_every_rank(case):
    rank, _ = me()
    mesh, model = mesh_of(dp=2, tp=2), Block(torch.float32)
    rows, columns = mesh.get_group("tp"), mesh.get_group("dp")
    axes: dict[str, Any] = {
        "no such axis": pe.Axes(replicate="data"),
        "no such axis on one rank": pe.Axes(replicate="data") if rank == 2 else DP,
        "no replicas": pe.Axes(),
        "replicas and shards": pe.Axes(replicate="dp", shard="dp"),
        "an axis twice": pe.Axes(replicate=("dp", "dp")),
        "no such count": pe.Axes(replicate="dp", count="cp"),
        "no such group": pe.Axes(replicate="dp", groups={"*": "ep"}),
        "no such parameter": pe.Axes(replicate="dp", groups={"expert.*": ()}),
        "other axes": DP if rank else pe.Axes(replicate="tp"),
        "no axes": "dp",
    }
    options: dict[str, Any] = {
        "both": {"process_group": rows, "device_mesh": mesh, "axes": DP},
        "no mesh": {"device_mesh": "cpu"},
        "axes without a mesh": {"axes": DP},
        "names without a mesh": {"axes": pe.Axes(groups={"up.*": "dp"})},
        "outside": {"process_group": rows, "axes": pe.Axes(groups={"up.*": columns})},
        "other groups": {"axes": pe.Axes(groups={"up.*": rows if rank == 0 else columns})},
        "other sizes": {"device_mesh": [mesh_of(dp=4, tp=1), mesh][rank // 2], "axes": DP},
    }
    given = options[case] if case in options else {"device_mesh": mesh, "axes": axes[case]}
    assert WRONG[case] in typed_error_of(lambda: pe.GradSync(model, **given))


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_raises_and_the_others_do_not():
    rank, _ = me()
    mesh = DeviceMesh("cpu", torch.arange(2))
    error = typed_error_of(lambda: pe.GradSync(Block(torch.float32), device_mesh=mesh))
    refused = "device_mesh: rank 2 is not in the mesh, which has the ranks [0, 1]"
    assert (refused if rank == 2 else "no error") in error


PARTS = {
    "summed": "parameter 'up.weight' is a DTensor on axis 'dp', over which its gradient is to be summed",
    "native": "parameter 'up.weight' is a DTensor of a narrow dtype, and accumulator='native'",
    "other experts": "parameter 0: rank 0 has 'experts.0.weight' [6, 6] float32; rank 2 has",
    "accumulate": "accumulate=[1, 2, 3, 4] by rank, but rank 0 shares its batch with rank 1",
    "terms": "means 2050 micro-batches per window over all ranks in 2 parts each",
    "ddp": "ddp_model reduces over ranks",
}


@on_ranks(2)
def test_dtensors_without_an_axis_of_data_are_refused_once_with_the_remedy():
    model = parallelize_module(Block(torch.float32), mesh_of(tp=2), {"up": ColwiseParallel()})
    error = typed_error_of(lambda: pe.GradSync(model, device_mesh=mesh_of(tp=2)))
    assert error.count("is a DTensor on axis 'tp'") == 1 and "a mesh of shape (1, 2)" in error
    mesh = mesh_of(dp=1, tp=2)
    model = parallelize_module(Block(torch.float32), mesh["tp"], {"up": ColwiseParallel()})
    assert typed_error_of(lambda: pe.GradSync(model, device_mesh=mesh, axes=DP)) == "no error"


@pytest.mark.parametrize("case", PARTS)
@on_ranks(4)
def test_what_cannot_be_had_on_a_mesh_is_refused_on_every_rank(case):
    rank, _ = me()
    mesh = mesh_of(dp=2, tp=2)
    options: dict[str, Any] = {"device_mesh": mesh, "axes": DP}
    model: nn.Module = Block(torch.bfloat16 if case == "native" else torch.float32)
    if case == "other experts":
        model = Experts(torch.float32)
        model.experts = nn.ModuleList([nn.Linear(6, 6 + rank)])
        options["axes"] = pe.Axes(replicate=("dp", "tp"), groups={"experts.*": "dp"})
    elif case == "accumulate":
        options["accumulate"] = 1 + rank
    elif case == "terms":
        options |= {"accumulate": 1025, "accumulator": "exact"}
        options["axes"] = pe.Axes(replicate=("dp", "tp"), count="dp")
    elif case == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group("tp"))
    else:
        over = {"summed": "dp", "native": "tp"}[case]
        parallelize_module(model, mesh[over], {"up": ColwiseParallel()})
        options["accumulator"] = "native"
    make = pe.attach if case == "ddp" else pe.GradSync
    assert PARTS[case] in typed_error_of(lambda: make(model, **options))


@pytest.mark.parametrize(
    ("counts", "are_alike"), [([2, 2, 2, 5], False), ([1, 2, 2, 1], False), ([3, 3, 4, 4], True)], ids=str
)
@on_ranks(4)
def test_ranks_that_share_a_batch_must_count_alike_and_their_count_counts_once(counts, are_alike):
    rank, _ = me()
    model = nn.Linear(3, 1)
    sync = pe.GradSync(model, accumulate=2, device_mesh=mesh_of(dp=2, tp=2), axes=DP)
    says = "ranks that share a batch have different counts: rank 0, batch 0: 2 micro-batches"
    with nullcontext() if are_alike else pytest.raises(ValueError, match=says):
        for window in sync.windows([torch.ones(1, 3)] * 2):
            for x in window:
                count = counts[rank]
                sync.backward(model(x).sum(), count=torch.tensor(count) if rank % 2 else count)
            sync.unscale_()
    if are_alike:
        # Two data shards of two micro-batches with a gradient of ones each, over counts of 2 * 3 + 2 * 4.
        assert model.weight.grad.sum().item() == pytest.approx(3 * 4 / 14, rel=1e-6)
