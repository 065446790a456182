"""Values are not overwritten if ranks hold different parts of a model under the same name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import error_of, me, recorded_warnings, typed_error_of
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pyengine as pe
from pyengine.comm import TorchDist


class XlaFullyShardedDataParallel(nn.Module):
    """A fake of torch_xla's class: parameters are flat shards, but not DTensors."""

    def __init__(self, module: nn.Module, *, is_sharded: bool = True) -> None:
        super().__init__()
        self.flat_param_0 = nn.Parameter(torch.full((4,), float(me()[0])))
        self.flat_param_0._is_sharded = is_sharded
        self._module = [module]


def _marked(**marks: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(me()[0]))
    nn.init.zeros_(model.bias)
    for name, value in marks.items():
        setattr(model.weight, name, value)
    return model


class FlatParameter(nn.Parameter):
    pass


class ShardedTensor(nn.Parameter):
    pass


def _of_class(kind: type[nn.Parameter]) -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    model.weight = kind(torch.full((2, 2), float(me()[0])))
    return model


SHARDS = {
    "torch_xla's FSDP": (lambda: XlaFullyShardedDataParallel(nn.Linear(2, 2)), "XlaFullyShardedDataParallel"),
    "the same within": (
        lambda: nn.Sequential(nn.Linear(2, 2), XlaFullyShardedDataParallel(nn.Linear(2, 2))),
        "XlaFullyShardedDataParallel at '1'",
    ),
    "its parameters alone": (
        lambda: XlaFullyShardedDataParallel(nn.Linear(2, 2)).parameters(),
        "parameter 'param0' is a shard (_is_sharded)",
    ),
    "a frozen shard": (lambda: _freeze(_marked(_is_sharded=True)), "'weight' is a shard (_is_sharded)"),
    "FSDP1 without its wrapper": (lambda: _of_class(FlatParameter), "shard (FlatParameter)"),
    "FSDP1 with originals": (lambda: _marked(_fsdp_flattened=True), "shard (_fsdp_flattened)"),
    "a flat parameter": (lambda: _marked(_is_flat_param=True), "shard (_is_flat_param)"),
    "ShardedTensor": (lambda: _of_class(ShardedTensor), "shard (ShardedTensor)"),
    "ZeRO-3": (lambda: _marked(ds_tensor=torch.ones(1), ds_id=0), "shard (ds_id)"),
    "ZeRO-3 by its status": (lambda: _marked(ds_status=SimpleNamespace(name="X")), "shard (ds_status)"),
}


def _freeze(model: nn.Linear) -> nn.Module:
    model.weight.requires_grad_(False)
    return model


def _values(source: Any) -> list[list[float]]:
    return [param.flatten().tolist() for param in source]


@pytest.mark.parametrize("case", SHARDS)
@on_ranks(2)
def test_shards_of_others_are_refused_by_name_before_any_is_overwritten(case):
    make, needle = SHARDS[case]
    made = make()
    params = list(made.parameters() if isinstance(made, nn.Module) else made)
    before = _values(params)
    message = typed_error_of(lambda: pe.GradSync(made if isinstance(made, nn.Module) else params))
    assert message.startswith("ValueError: all ranks: params_or_module") and needle in message
    assert "fully_shard" in message and _values(params) == before


@on_ranks(2)
def test_shards_on_one_rank_alone_are_refused_on_every_rank():
    model = _marked(**({"_is_sharded": True} if me()[0] else {}))
    assert "rank 1: params_or_module: give the engine the model before" in error_of(pe.GradSync, model)
    assert model.weight[0, 0] == me()[0]


@pytest.mark.parametrize(
    "marks",
    [{"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}, {"allreduce": False}],
    ids=["tensor parallelism", "experts"],
)
@on_ranks(2)
def test_values_that_differ_under_a_mark_of_parts_are_not_overwritten(marks):
    model = _marked(**marks)
    message = typed_error_of(lambda: pe.GradSync(model))
    assert message.startswith("ValueError: give the engine the group of ranks that hold replicas of 'weight'")
    assert next(iter(marks)) in message and "ranks 0 and 1 hold different values" in message
    assert model.weight[0, 0] == me()[0]


@on_ranks(2)
def test_values_that_differ_under_a_mark_on_one_rank_are_refused_on_every_rank():
    model = _marked(tensor_model_parallel=me()[0] == 1)
    assert "hold replicas of 'weight'" in error_of(pe.GradSync, model)


@on_ranks(4)
def test_a_mark_of_parts_is_no_matter_in_the_group_of_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _marked(tensor_model_parallel=True)
    nn.init.constant_(model.weight, float(mesh.get_local_rank("tp")))
    with recorded_warnings() as messages:
        pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(replicate="dp", shard="tp"))
    assert not messages and model.weight[0, 0] == mesh.get_local_rank("tp")


@on_ranks(4)
def test_a_part_over_the_wrong_axis_is_refused_on_every_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _marked(tensor_model_parallel=True)
    nn.init.constant_(model.weight, float(dist.get_rank() == 3))  # differs in one group only
    message = error_of(lambda: pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(replicate="dp")))
    assert "ranks 1 and 3 hold different values" in message
    assert model.weight[0, 0] == (dist.get_rank() == 3)


@on_ranks(3)
def test_replicas_of_other_values_get_those_of_rank_0_and_one_rank_says_so():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(me()[0] == 2))
    nn.init.zeros_(model.bias)
    model.register_buffer("scale", torch.full((), float(me()[0])))
    with recorded_warnings() as messages:
        pe.GradSync(model).close()
    assert model.weight[0, 0] == model.scale == 0
    if me()[0]:
        assert not messages
    else:
        (text,) = messages
        assert text.startswith("use the same seed on every rank")
        assert "rank 2 had different values of 'weight' and 1 more" in text


NO_ALARM = {
    "equal values": lambda: _equal(),
    "marks that say no": lambda: _equal(
        _is_sharded=False, tensor_model_parallel=False, ds_tensor=None, partition_dim=-1, allreduce=True
    ),
    "marks of parts that are replicas": lambda: _equal(tensor_model_parallel=True, allreduce=False),
    "nan and -0": lambda: _equal(torch.tensor([[float("nan"), -0.0], [0.0, float("inf")]])),
    "an unsharded part of torch_xla's": lambda: _equal(torch.eye(2), _is_sharded=False),
}


def _equal(values: torch.Tensor | None = None, **marks: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if values is not None:
        model[0].weight = nn.Parameter(values)
    for name, value in marks.items():
        setattr(model[0].weight, name, value)
    return model


@pytest.mark.parametrize("case", NO_ALARM)
@on_ranks(2)
def test_replicas_of_equal_values_are_silent(case):
    with recorded_warnings() as messages:
        pe.GradSync(NO_ALARM[case]()).close()
    assert not messages


@on_ranks(2)
def test_the_sign_of_a_zero_is_a_difference():
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, -0.0 if me()[0] else 0.0)
    with recorded_warnings() as messages:
        pe.GradSync(model).close()
    assert len(messages) == (me()[0] == 0) and not model.weight.signbit().any()


BUFFERS = {
    "sizes": (lambda rank: {"cache": torch.zeros(2 + rank)}, ("'cache' of torch.float32 [3]", "[2]")),
    "names": (lambda rank: {"ab"[rank]: torch.zeros(2)}, ("'b' of", "'a' of")),
    "numbers": (lambda rank: {"cache": torch.zeros(2)} if rank else {}, ("'cache' of", "nothing more")),
}


@pytest.mark.parametrize("case", BUFFERS)
@on_ranks(2)
def test_buffers_that_no_broadcast_fits_are_named_on_every_rank(case):
    of_rank, texts = BUFFERS[case]
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    for name, buffer in of_rank(me()[0]).items():
        model.register_buffer(name, buffer)
    message = error_of(pe.GradSync, model)
    assert message.startswith("build the same model on every rank: rank 1 has")
    assert all(text in message for text in texts)


@on_ranks(2)
def test_one_rank_alone_compares_with_nobody():
    model = _marked(tensor_model_parallel=True)
    group = [dist.new_group([rank]) for rank in range(2)][me()[0]]
    with recorded_warnings() as messages:
        pe.GradSync(model, process_group=group).close()
    assert not messages and model.weight[0, 0] == me()[0]


@pytest.mark.parametrize("are_alike", [True, False])
@on_ranks(2)
def test_values_are_broadcast_only_where_ranks_differ(are_alike):
    torch.manual_seed(0 if are_alike else me()[0])
    model = nn.Linear(3, 2)
    with (
        mock.patch.object(TorchDist, "broadcast_", autospec=True, side_effect=TorchDist.broadcast_) as sent,
        recorded_warnings(),
    ):
        pe.GradSync(model)
    assert sent.call_count == (0 if are_alike else 1)
