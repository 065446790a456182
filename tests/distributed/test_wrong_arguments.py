"""Errors name a wrong argument on every rank, with what was passed, what is needed, and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import me, typed_error_of
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

SETTINGS = {
    "cap zero": ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: expected a finite size above 0"),
    "cap huge": ({"bucket_cap_mb": 1e308}, "bucket_cap_mb=1e+308: expected a finite size above 0"),
    "cap nan": ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan: expected a finite size above 0"),
    "cap bool": ({"bucket_cap_mb": True}, "bucket_cap_mb=True: expected a finite size above 0"),
    "cap text": ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25': expected a finite size above 0"),
    "wire name": ({"wire": "bf17"}, "wire='bf17': expected a wire, for example pe.wire.BF16()"),
    "wire class": ({"wire": pe.wire.FP16}, "wire=FP16 is a class: pass an instance"),
    "wire dtype": ({"wire": torch.float64}, "wire=torch.float64: expected a wire"),
    "wire exact": ({"wire": torch.bfloat16, "accumulator": "exact"}, "wire=BF16(): expected wire.FP32()"),
    "wire none": ({"wire": None}, "wire=None: expected a wire"),
    "wire unpicklable": ({"wire": lambda: 0}, "expected a wire, for example"),
    "nonfinite name": ({"nonfinite": "ignore"}, "nonfinite='ignore': expected one of 'skip', 'raise'"),
    "nonfinite list": ({"nonfinite": ["skip"]}, "nonfinite=['skip']: expected one of 'skip', 'raise'"),
    "nonfinite array": ({"nonfinite": np.ones(2)}, "expected one of 'skip', 'raise'"),
    "accumulator array": ({"accumulator": np.ones(2)}, "expected one of 'fp32', 'native', 'exact'"),
    "accumulator dtype": ({"accumulator": torch.bfloat16}, "'fp32', 'native', 'exact', or torch.f"),
    "accumulator class": ({"accumulator": pe.Exact}, "expected one of 'fp32', 'native', 'exact'"),
    "exact bool": ({"accumulator": pe.Exact(micro_batches=True)}, "expected a whole number of micro-batches"),
    "accumulate tensor": ({"accumulate": torch.tensor(2)}, "an int from 1 to 2**20, got a Tensor"),
    "accumulate numpy": ({"accumulate": np.int64(2)}, "an int from 1 to 2**20, got a int64"),
    "accumulate float": ({"accumulate": 2.0}, "an int from 1 to 2**20, got a float"),
    "accumulate bool": ({"accumulate": True}, "accumulate=True: expected micro-batches"),
    "accumulate zero": ({"accumulate": 0}, "accumulate=0: expected micro-batches"),
    "accumulate auto": ({"accumulate": "auto"}, "accumulate=1, and sync.retry_smaller(share, fn)"),
    "accumulate huge": ({"accumulate": 10**12}, "accumulate=1000000000000: expected micro-batches"),
    "process_group": ({"process_group": "dp"}, "process_group='dp' is a str: expected a torch.distributed"),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("own", case) for case in SETTINGS),
        *(("attach", case) for case in ("wire name", "nonfinite list", "exact bool", "accumulate tensor")),
    ],
)
@on_ranks(2)
def test_a_wrong_setting_on_one_rank_is_named_on_every_rank(kind, case):
    options = {"accumulate": 2, **(SETTINGS[case][0] if me()[0] == 1 else {})}
    model: nn.Module = nn.Linear(2, 2)
    if kind == "own":
        message = typed_error_of(lambda: pe.GradSync(model, **options))
    else:
        ddp = DistributedDataParallel(model)
        message = typed_error_of(lambda: pe.attach(ddp, **options))
    assert message.startswith("ValueError") and SETTINGS[case][1] in message and "rank 1: " in message


@on_ranks(2)
def test_equal_sizes_of_another_type_are_the_same_setting():
    pe.GradSync(nn.Linear(2, 2), accumulate=1, bucket_cap_mb=(25, np.float32(25.0))[me()[0]])


SOURCES = {
    "names": (lambda m: list(m.state_dict()), "TypeError: params_or_module: got a str at index 0"),
    "groups": (lambda m: [{"params": list(m.parameters())}], "TypeError: params_or_module: got a dict"),
    "number": (lambda m: 3, "TypeError: params_or_module is a int"),
    "tensor": (lambda m: m.weight, "TypeError: params_or_module is a Parameter"),
    "not a leaf": (lambda m: [m.weight * 2], "ValueError: all ranks: parameter 'param0' is not a leaf"),
    "twice": (
        lambda m: [m.weight, m.bias, m.weight],
        "ValueError: all ranks: parameter 'param2' is the same as 'param0'",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
@on_ranks(2)
def test_what_is_no_set_of_parameters_is_named(case):
    assert typed_error_of(lambda: pe.GradSync(SOURCES[case][0](nn.Linear(2, 2)), accumulate=1)).startswith(
        SOURCES[case][1]
    )


def _engine() -> tuple[nn.Module, pe.Sync]:
    model = nn.Linear(2, 1, bias=False)
    return model, pe.GradSync(model, accumulate=1)


def _window(model: nn.Module, sync: pe.Sync, count: object) -> None:
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum(), count=count)
    sync.unscale_()


@pytest.mark.parametrize("count", ["4", torch.tensor(1j), torch.ones(2)], ids=repr)
def test_a_count_that_is_no_number_is_refused_before_the_backward(count):
    model, sync = _engine()
    with pytest.raises((TypeError, ValueError), match="^count"):
        _window(model, sync, count)
    _window(model, sync, 2)
    assert torch.equal(model.weight.grad, torch.full((1, 2), 0.5))


@pytest.mark.parametrize("count", [10**400, 2.0**53 + 2, torch.tensor(1e308, dtype=torch.float64)])
@on_ranks(2)
def test_a_count_too_large_to_be_added_up_is_named_on_every_rank(count):
    model, sync = _engine()
    before = model.weight.detach().clone()
    mine = count if me()[0] == 1 else 2
    message = typed_error_of(_window, model, sync, mine)
    sync.abandon()
    assert torch.equal(model.weight, before)
    _window(model, sync, 2)
    assert "but rank 1: count of micro-batch 0 is" in message and "at most 2**53" in message
    assert model.weight.grad[0, 0].item() == 0.5


def _made_on_meta() -> object:
    with torch.device("meta"):
        return pe.GradSync(nn.Linear(1, 1))


def _with_grad_dtype() -> object:
    model = nn.Linear(1, 1).bfloat16()
    model.weight.grad_dtype = torch.float32
    return pe.GradSync(model)


@pytest.mark.parametrize(
    ("make", "needle"),
    [
        (_made_on_meta, "parameters are on the meta device"),
        (_with_grad_dtype, "parameter 'weight' is torch.bfloat16 and has grad_dtype=torch.float32"),
        (lambda: pe.GradSync(nn.Linear(1, 1), wire="int4"), "one of the names fp32, bf16, fp16, "),
        (
            lambda: pe.GradSync(nn.Linear(2, 2).requires_grad_(False)),
            "none of the 2 parameters requires a gradient",
        ),
        (lambda: pe.GradSync(nn.Linear(2, 2, dtype=torch.float64)), "'weight' is torch.float64 (and 1 more"),
    ],
)
def test_parameters_and_wires_that_no_engine_supports_are_named_with_a_remedy(make, needle):
    with pytest.raises(ValueError) as found:
        make()
    assert needle in str(found.value)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_step_with_a_windows_gradient_is_named(kind):
    model, sync = _engine()
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(TypeError, match=f"optimizer is an? {kind.__name__}, .*use"):
        sync.step(kind(model.parameters()))


@pytest.mark.parametrize(
    "use",
    [lambda model, x: model(x), lambda model, x: model(x.float()), lambda model, x: model(x["input"])],
)
def test_a_window_that_is_used_as_a_batch_names_the_inner_loop(use):
    model, sync = _engine()
    with pytest.raises((TypeError, AttributeError), match="for window in sync.windows"):
        for window in sync.windows([torch.ones(1, 2)]):
            use(model, window)


def test_a_plan_prints_its_micro_batches_a_window():
    plan = pe.plan_batch(global_batch=40, micro_batch=8, world_size=2, uneven=True)
    assert repr(plan).endswith("world_size=2, accumulate=2 or 3)")


def test_exact_sums_name_the_limit_that_a_finite_gradient_may_have_passed():
    weight = nn.Parameter(torch.ones(1))
    sync = pe.GradSync([weight], accumulator="exact", nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"or from a finite value of 2\*\*126"), sync.accumulate():
        sync.backward((weight * 1.6e38).sum())


@on_ranks(2)
def test_ranks_with_different_accumulate_are_refused_with_the_numbers():
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(1))
    sync = pe.GradSync([weight], accumulate=1 + rank)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(RuntimeError) as error:
        for k in range(2):
            with sync.accumulate():
                sync.backward(weight.sum())
            if k or rank == 0:
                sync.step(optimizer)
        sync.synchronize()
    assert "accumulate=[1, 2] by rank" in str(error.value)


@on_ranks(4)
def test_a_units_group_that_was_destroyed_is_named():
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sync = pe.attach(fully_shard(model, mesh=mesh))
    dist.destroy_process_group(mesh.get_group("shard"))
    with pytest.raises(RuntimeError) as found, sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    assert str(found.value).startswith("set up the process group, the model and the engine again")


@pytest.mark.parametrize("case", ["fully_shard", "DTensor", "FSDP1", "FSDP1 with originals"])
@on_ranks(2)
def test_a_sharded_model_is_refused_with_what_it_got_and_what_works(case):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4))
    if case == "fully_shard":
        fully_shard(model, mesh=mesh)
    elif case == "DTensor":
        model = distribute_module(model, mesh)
    else:
        options = {"device_id": torch.device("cpu"), "use_orig_params": case.endswith("originals")}
        model = FullyShardedDataParallel(model, **options)
    message = typed_error_of(lambda: pe.GradSync(model, accumulate=1))
    assert message.startswith("ValueError") and "fully_shard" in message
    assert ("FullyShardedDataParallel" if case.startswith("FSDP1") else "DTensor") in message


def test_a_callback_that_cannot_be_called_is_refused_before_any_step():
    _, sync = _engine()
    with pytest.raises(TypeError, match="callback is a dict"):
        sync.on_step({})
