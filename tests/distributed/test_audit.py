"""The audit of engines and of other training loops: each fault is named, and correct loops raise no error."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import assert_alike, error_of, records_of
from marks import rest
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.window import header as headers

ACCUMULATE = 3


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)).to(dtype)


def _batches(num: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = torch.Generator().manual_seed(dist.get_rank() + 1)
    return [torch.randn(3 + index % 3, 8, generator=made).to(dtype) for index in range(num)]


def _loss(out: Tensor) -> Tensor:
    return out.float().square().sum()


def _sharded(model: nn.Sequential, kind: str) -> nn.Module:
    world = dist.get_world_size()
    shape = (2, world // 2) if kind == "hsdp" else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- Engines ----

_WIRES = {
    "bf16": pe.wire.BF16(),
    "int8": pe.wire.Int8(),
    "fp8": pe.wire.FP8(),
    "feedback": pe.wire.ErrorFeedback(pe.wire.Int8(block=32)),
}


def _engine(kind: str) -> tuple[nn.Module, nn.Module, pe.Sync]:
    model = forward = _net(torch.bfloat16 if kind == "narrow" else torch.float32)
    options = {"accumulate": ACCUMULATE}
    if kind == "attach":
        forward = DistributedDataParallel(model)
        return model, forward, pe.attach(forward, **options)
    if kind in ("fsdp", "hsdp"):
        forward = _sharded(model, kind)
        return model, forward, pe.attach(forward, **options)
    if kind in ("exact", "native"):
        options["accumulator"] = kind
    if kind in _WIRES:
        options["wire"] = _WIRES[kind]
    return model, forward, pe.GradSync(model, bucket_cap_mb=1e-3, **options)


@pytest.mark.parametrize(
    ("kind", "world", "every", "is_penalised"),
    [
        ("own", 3, 3, False),
        ("attach", 3, 1, False),
        ("own", 2, 1, True),
        ("attach", 2, 1, True),
        ("hsdp", 4, 1, False),
        *((kind, 2, 1, False) for kind in ("exact", "native", "narrow", "bf16", "fp8", "feedback")),
        *rest(("fsdp", 2, 1, False)),
    ],
)
@on_ranks()
def test_an_engine_without_a_fault_raises_nothing(kind, every, is_penalised):
    """Includes a short last window, ranks without data (unless sharded), clipping, and a gradient penalty."""
    model, forward, sync = _engine(kind)
    records = records_of(sync)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch = sync.audit(every=every, module=model)
    dtype = next(model.parameters()).dtype
    early = 0 if kind in ("fsdp", "hsdp") else dist.get_rank()
    for window in sync.windows(_batches(ACCUMULATE * 4 - 1 - early, dtype)):
        for x in window:
            loss = _loss(forward(x))
            if is_penalised:
                torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            sync.backward(loss, count=len(x))
        sync.clip_grad_norm_(0.5)
        sync.step(optimizer)
    watch.remove()
    assert len(records) == 4


def _local(param: nn.Parameter) -> Tensor:
    return (param.to_local() if hasattr(param, "to_local") else param).detach()


Patch = pytest.MonkeyPatch


def _flip(sync: pe.Sync, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
    """Flip a bit of a parameter on the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _local(optimizer.param_groups[0]["params"][0]).view(-1).view(torch.int32)[5] ^= 1 << 20


def _rate(sync: pe.Sync, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
    """Change the learning rate on rank 1."""
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.02


def _unreduced(sync: pe.Sync, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
    """Leave a bucket as it is, although the transport reports that it has been reduced."""
    comm = sync._engine.reducer._groups.comms[0]
    whole = comm.all_reduce
    patch.setattr(
        comm, "all_reduce", lambda flat: whole(flat if flat.dtype == torch.float64 else flat.clone())
    )


def _divisor(sync: pe.Sync, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
    """Make the count in rank 0's header too small."""
    before = headers._with_device_values

    def forgetful(*args: object) -> Tensor:
        vector = before(*args)
        vector[0] -= 2.0 * (dist.get_rank() == 0)
        return vector

    patch.setattr(headers, "_with_device_values", forgetful)


def _twice(sync: pe.Sync, optimizer: torch.optim.Optimizer, patch: Patch) -> None:
    """Divide by the number of ranks once more after the reduction."""
    reducer = sync._engine.reducer
    before = reducer.finish

    def finish(final: object) -> None:
        before(final)
        for param in reducer.params:
            param.grad /= dist.get_world_size()

    patch.setattr(reducer, "finish", finish)


@pytest.mark.parametrize(
    ("kind", "fault", "world", "what", "wrong", "cause"),
    [
        ("own", _flip, 3, "parameter", (2,), "a flipped bit"),
        ("hsdp", _flip, 4, "parameter", (), "a flipped bit"),
        ("int8", _divisor, 2, "divisor", (), "was counted"),
        ("own", _rate, 2, "hyperparameters", (), "lr of group 0 differs (rank 0: 0.01; rank 1: 0.02)"),
        ("own", _unreduced, 2, "gradient", (), "not reduced"),
        ("attach", _divisor, 2, "divisor", (), "was counted"),
        ("fsdp", _divisor, 2, "divisor", (), "was counted"),
        ("attach", _twice, 2, "gradient", (), "scaled by 1/2"),
        ("fsdp", _twice, 2, "gradient", (), "scaled by 1/2"),
    ],
)
@on_ranks()
def test_a_fault_in_an_engine_is_named_and_nothing_is_stepped(kind, fault, what, wrong, cause):
    model, forward, sync = _engine(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sync.audit(every=1, module=model)
    windows = sync.windows(_batches(ACCUMULATE * 3))
    with Patch.context() as patch, pytest.raises(pe.AuditError) as error:
        for index, window in enumerate(windows):
            if index == 1:
                fault(sync, optimizer, patch)
            before = [_local(p).clone() for p in model.parameters()]
            for x in window:
                sync.backward(_loss(forward(x)), count=len(x))
            sync.step(optimizer)
    with pytest.raises(RuntimeError, match=r"sync\.abandon\(\)"):
        sync.step(optimizer)
    assert all(map(torch.equal, map(_local, model.parameters()), before))
    sync.abandon()
    finding = error.value.findings[0]
    assert (finding.what, finding.ranks) == (what, wrong)
    assert cause in finding.cause
    assert finding.step in (1, 2) and finding.step - finding.since <= 1


@pytest.mark.parametrize(("kind", "flips"), [("own", True), ("attach", True), ("attach", False)])
@on_ranks(4)
def test_a_group_of_experts_is_compared_within_and_all_ranks_learn_of_it(kind, flips):
    """Ranks 0 and 2 share experts, as do ranks 1 and 3."""
    model, rank = _net(), dist.get_rank()
    model.add_module("experts", nn.Linear(3, 3))
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    axes = pe.Axes(groups={"experts.*": pairs[rank % 2]})
    nn.init.constant_(model.experts.weight, 0.1 * (1 + rank % 2))
    if kind == "attach":
        ignored = ["experts.weight", "experts.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        forward = DistributedDataParallel(model)
        sync = pe.attach(forward, accumulate=2, axes=axes)
    else:
        forward, sync = model, pe.GradSync(model, accumulate=2, axes=axes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sync.audit(every=1)
    found = "^audit: parameter of 'experts.weight', at step 1"
    with pytest.raises(pe.AuditError, match=found) if flips else nullcontext():
        for index, window in enumerate(sync.windows(_batches(6))):
            if flips and index == 1 and rank == 2:
                model.experts.weight.data[0, 0] += 1
            for x in window:
                sync.backward(_loss(forward(x)), count=len(x))
            sync.step(optimizer)


def test_wrong_arguments_of_an_engines_audit_are_named():
    with pe.GradSync(_net()) as sync:
        with pytest.raises(ValueError, match="every=0"):
            sync.audit(every=0)
        with pytest.raises(TypeError, match="every=2.5 is a float"):
            sync.audit(every=2.5)
        with pytest.raises(TypeError, match="every=True is a bool"):
            sync.audit(every=True)
        sync.audit(every=2)
        with pytest.raises(RuntimeError, match="audited already"):
            sync.audit(every=2)


# ---- Other training loops ----


@pytest.mark.parametrize(
    ("world", "kind", "clips", "reports", "every"),
    [
        (2, "ddp", False, False, 3),
        (2, "ddp", True, False, 1),
        (2, "ddp", True, True, 1),
        (2, "fsdp", False, True, 1),
        (4, "hsdp", False, True, 1),
    ],
)
@on_ranks()
def test_a_stock_loop_without_a_fault_raises_nothing(kind, clips, reports, every):
    model = _net()
    is_ddp = kind == "ddp"
    stock = DistributedDataParallel(model, gradient_as_bucket_view=True) if is_ddp else _sharded(model, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pe.audit(stock, optimizer, every=every) as watch:
        for _ in range(4):
            for index, x in enumerate(_batches(ACCUMULATE)):
                is_last = index == ACCUMULATE - 1
                if not is_ddp:
                    stock.set_requires_gradient_sync(is_last)
                with stock.no_sync() if is_ddp and not is_last else nullcontext():
                    (_loss(stock(x)) / ACCUMULATE).backward()
            if reports:
                watch.reduced()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert watch.step == 4


@pytest.mark.parametrize("factor", [3.0, 0.2])
@on_ranks(2)
def test_a_gradient_that_grows_apart_from_those_that_were_clipped_is_named(factor):
    """All gradients are multiplied by the same factor, which is no fault; one has an additional factor."""
    model = _net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pe.audit(ddp, optimizer, every=1)
    _loss(ddp(_batches(1)[0])).backward()
    for param in model.parameters():
        param.grad.mul_(0.5 * factor if param is model[2].bias else 0.5)
    with pytest.raises(pe.AuditError) as error:
        optimizer.step()
    assert str(error.value).startswith("audit: gradient of '2.bias'")
    assert "'0." not in str(error.value) and "'2.weight'" not in str(error.value)


@on_ranks(4)
def test_replicas_that_are_not_reduced_are_named():
    """HSDP without its reduction over replicas, in every window."""
    model = _net()
    _sharded(model, "hsdp")
    model.set_requires_all_reduce(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pe.audit(model, optimizer, every=1)
    _loss(model(_batches(1)[0])).backward()
    for param in model.parameters():  # gradients that differ between replicas
        param.grad = torch.full_like(param, float(dist.get_rank()))
    with pytest.raises(pe.AuditError) as error:
        optimizer.step()
    assert str(error.value).startswith("audit: gradient of '0.weight'")


@pytest.mark.parametrize("reduces", [True, False])
@on_ranks(2)
def test_main_grad_is_looked_at(reduces):
    """As in Megatron: gradients are added to `main_grad` in every backward, and fp32 masters are stepped."""
    model = _net(torch.bfloat16)
    params = list(model.parameters())

    def take(param: nn.Parameter) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None

    for param in params:
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        param.register_post_accumulate_grad_hook(take)
    masters = [param.detach().float().clone().requires_grad_() for param in params]
    optimizer = torch.optim.Adam(masters, lr=0.01)
    fault = nullcontext() if reduces else pytest.raises(pe.AuditError, match="not reduced")
    with pe.audit(model, optimizer, every=1) as watch, fault:
        for _ in range(3):
            for param in params:
                param.main_grad.zero_()
            for x in _batches(ACCUMULATE, torch.bfloat16):
                (_loss(model(x)) / ACCUMULATE).backward()
            for param, master in zip(params, masters, strict=True):
                if reduces:
                    dist.all_reduce(param.main_grad)
                    param.main_grad /= dist.get_world_size()
                master.grad = param.main_grad
            watch.reduced()
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master)


@pytest.mark.parametrize("reports", [False, True])
@on_ranks(2)
def test_windows_without_a_step_are_not_mixed_with_the_next(reports):
    """Every other step is skipped, as by a loss scaler: the next window's gradients come before a step."""
    model = _net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = pe.audit(ddp, optimizer, every=1)
    for window in range(5):
        for x in _batches(2):
            (_loss(ddp(x)) / 2).backward()
        if reports:
            watch.reduced()
        if window % 2:  # other steps are skipped
            optimizer.step()
        optimizer.zero_grad()
    watch.remove()
    assert watch.step == 2


@on_ranks(2)
def test_other_models_are_named_on_every_rank():
    model = nn.Linear(4, 3 + dist.get_rank())
    error = error_of(pe.audit, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_alike(error)
    assert "rank 0 has 'weight' torch.float32 [3, 4], rank 1 has 'weight' torch.float32 [4, 4]" in error


def test_wrong_arguments_are_named():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="model is a list"):
        pe.audit([], optimizer)
    with pytest.raises(TypeError, match="optimizer is a Linear"):
        pe.audit(model, model)
    with pytest.raises(ValueError, match="every=0"):
        pe.audit(model, optimizer, every=0)
    with pytest.raises(ValueError, match="tolerance=-1"):
        pe.audit(model, optimizer, tolerance=-1)
    with pytest.raises(TypeError, match=r"groups\['x'\]=3 is a int"):
        pe.audit(model, optimizer, groups={"x": 3})
    with pytest.raises(ValueError, match="nothing to audit"):
        pe.audit(model, optimizer, groups={"*": None})


def test_a_handle_leaves_nothing_behind():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = pe.audit(model, optimizer, every=1)
    assert watch._auditor.probe.is_armed
    watch.remove()
    assert not watch._auditor.probe.is_armed
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.slow  # unfinished collectives end only after a timeout
@on_ranks(2)
def test_a_rank_that_leaves_out_a_step_gets_an_error_as_the_others_do():
    """Rank 1 skips a step and goes on with the next backward, while rank 0 waits in its check."""
    _set_pg_timeout(timedelta(seconds=2), None)
    model = DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pe.audit(model, optimizer, every=1)
    with pytest.raises(RuntimeError) as error:
        for window, batch in enumerate(_batches(3)):
            _loss(model(batch)).backward()
            if not (window and dist.get_rank()):
                optimizer.step()
    assert dist.get_rank() or "not every rank has reached optimizer.step() of window 1" in str(error.value)
