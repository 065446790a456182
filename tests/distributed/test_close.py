"""A closed engine releases its model, and no second engine may use the parameters of an open one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from cases import Integers, assert_same, engine, grads, integers, me, mean_of_integers, recorded_warnings
from ranks import on_ranks
from sharded_cases import sharded
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _window(sync: pe.Sync, forward: nn.Module) -> None:
    for k in range(2):
        with sync.accumulate():
            sync.backward(forward(*integers(10 * me()[0] + k)), count=3)


def _right(model: Integers) -> None:
    batches = [integers(10 * r + k) for r in range(me()[1]) for k in range(2)]
    assert_same(grads(model), mean_of_integers(model, batches, 6 * me()[1]))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("own", torch.bfloat16),
        ("own-native", torch.float32),
        ("own-exact", torch.float32),
        ("attach", torch.float32),
    ],
)
@on_ranks(2)
def test_a_closed_engine_lets_others_have_the_model_and_leaves_the_callers_gradients(kind, dtype):
    model = Integers(dtype)
    sync, forward = engine(kind, model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _window(sync, forward)
    sync.step(optimizer)
    sync.close()
    assert not any(param.grad is not None for param in model.parameters())
    with pytest.raises(RuntimeError, match="has been closed"):
        sync.step(optimizer)
    with pytest.raises(RuntimeError, match="has been closed"):
        sync.on_step(print)
    with pe.GradSync(model, accumulate=2) as other:
        _window(other, model)
        other.unscale_()
        _right(model)
        other.step(optimizer)
        _window(other, model)
        other.unscale_()
        buffers = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    _right(model)  # the caller's gradients stay, in memory of their own
    assert not buffers & {p.grad.untyped_storage().data_ptr() for p in model.parameters()}


@on_ranks(2)
def test_ddp_reduces_by_itself_again_behind_a_closed_engine_and_under_the_next_one_it_does_not():
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine("attach", model, accumulate=2)
    sync.close()
    forward(*integers(rank)).backward()
    assert_same(grads(model), mean_of_integers(model, [integers(r) for r in range(world)], world))
    model.zero_grad()
    with pe.attach(forward, accumulate=2) as other:
        _window(other, forward)
        other.unscale_()
        _right(model)


DDPS_OWN = {"_has_rebuilt_buckets", "_lazy_init_ran"}  # what DDP has done, with or without an engine


def _settings(*modules: nn.Module) -> list[object]:
    """Describe all attributes and hooks of modules and parameters that an engine might leave changed."""
    found: list[object] = []
    for module in (each for root in modules for each in root.modules()):
        for name, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | str | float | None) and name not in DDPS_OWN:
                found.append((name, value))
            elif isinstance(value, dict) and name.endswith("hooks"):
                found.append((name, list(value.items())))
    for root in modules:
        for p in root.parameters():
            found.append((p.requires_grad, sorted(vars(p)), bool(p._backward_hooks), p.grad is None))
            found.append(len(p._post_accumulate_grad_hooks or ()))
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "when"),
    [
        ("own", torch.float32, "new"),
        ("own", torch.bfloat16, "open"),
        ("own native", torch.float32, "open"),
        ("own exact", torch.float32, "stepped"),
        ("attach", torch.float32, "open"),
        ("attach", torch.bfloat16, "stepped"),
        ("attach exact", torch.float32, "open"),
        ("attach exact", torch.float32, "new"),
    ],
)
@on_ranks(2)
def test_close_undoes_everything(kind, dtype, when):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
    ddp = DistributedDataParallel(model) if kind.startswith("attach") else model
    before = _settings(model, ddp)
    _, _, accumulator = kind.partition(" ")
    make = pe.attach if kind.startswith("attach") else pe.GradSync
    sync = make(ddp, accumulate=2, accumulator=accumulator or "fp32", wire=torch.float32)
    x = torch.ones(2, 3, dtype=dtype)
    for k in range({"new": 0, "open": 3, "stepped": 2}[when]):
        with sync.accumulate():
            sync.backward(ddp(x).float().sum())
        if k == 1:
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    with recorded_warnings() as messages:
        sync.close()
        sync.close()  # a second call does nothing
    left = "1 micro-batches of window 1 were accumulated but never stepped"
    assert [left in message for message in messages] == [True] * (when == "open")
    after = _settings(model, ddp)
    assert after == before, [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]][:3]
    twin = copy.deepcopy(model)
    ddp(x).float().sum().backward()
    twin(x).float().sum().backward()  # the same on every rank, as is the mean
    assert all(map(torch.equal, [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]))


@pytest.mark.parametrize(
    ("kind", "other"), [("own", "GradSync"), ("own", "attach"), ("attach", "GradSync"), ("attach", "attach")]
)
@on_ranks(2)
def test_an_engine_over_parameters_of_a_live_one_is_refused_by_name(kind, other):
    model = nn.Linear(4, 2)
    sync, forward = engine(kind, model, accumulate=2)
    if other == "attach" and not isinstance(forward, DistributedDataParallel):
        forward = DistributedDataParallel(model)
    says = r"call sync\.close\(\).*parameter.* and 1 more belongs to an engine"
    with pytest.raises(ValueError, match=says):
        pe.attach(forward, accumulate=1) if other == "attach" else pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 4)).sum())
    assert sync.step(optimizer)  # the first engine still works


@on_ranks(2)
def test_grad_sync_over_a_ddp_model_is_refused():
    with pytest.raises(ValueError, match="holds a DistributedDataParallel") as error:
        pe.GradSync(DistributedDataParallel(nn.Linear(4, 2)))
    assert "pe.attach(ddp_model)" in str(error.value) and ".module" in str(error.value)


@on_ranks(2)
def test_a_model_with_a_hidden_ddp_is_refused():
    model = nn.Sequential(replicate(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"holds a DDPLinear.*do not call replicate"):
        pe.GradSync(model)
    with pytest.raises(TypeError, match=r"DDPLinear: replicate .* hides its DDP.*replicate_with_fsdp"):
        pe.attach(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_saved_and_copied_at_its_own_size(dtype):
    model = nn.Linear(300, 300).to(dtype)
    model.weight.is_expert = True  # attributes set by other code are kept

    def size() -> int:
        file = io.BytesIO()
        torch.save(model, file)
        return len(file.getvalue())

    alone = size()
    sync = pe.GradSync(model, accumulate=1)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 300, dtype=dtype)).sum().float())
    assert size() == alone
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.weight, model.weight)
        with pe.GradSync(twin, accumulate=1) as other, other.accumulate():
            other.backward(twin(torch.ones(1, 300, dtype=dtype)).sum().float())
    assert pickle.loads(pickle.dumps(model)).weight.is_expert


def test_backwards_of_one_engine_in_several_threads_are_refused():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=3)
    began, may_end = threading.Event(), threading.Event()

    def wait(grad: torch.Tensor) -> torch.Tensor:
        began.set()
        may_end.wait(20)
        return grad

    def slow() -> None:
        x = torch.ones(1, 2, requires_grad=True)
        x.register_hook(wait)
        sync.backward(model(x).sum())

    for window in sync.windows([0, 1, 2]):
        for index in window:
            if index:
                sync.backward(model(torch.ones(1, 2)).sum())
                continue
            thread = threading.Thread(target=slow)
            thread.start()
            began.wait(20)
            with pytest.raises(RuntimeError, match="another backward of this engine is running"):
                sync.backward(model(torch.ones(1, 2)).sum())
            may_end.set()
            thread.join()
        sync.unscale_()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))  # the refused backward added nothing


def _trained(kind: str) -> tuple[weakref.ref, weakref.ref]:
    if kind in ("nested", "replicate"):
        sync, forward = sharded(kind, accumulate=1)
        model: nn.Module = forward
        x = torch.ones(2, 5)
    else:
        model, x = nn.Linear(3, 2), torch.ones(2, 3)
        if kind == "hooked":
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda _: None)
        forward = DistributedDataParallel(model) if kind == "attach" else model
        sync = pe.attach(forward, accumulate=1) if kind == "attach" else pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with sync.accumulate():
            sync.backward(forward(x).sum())
        sync.step(optimizer)
    return weakref.ref(sync._engine), weakref.ref(model)


@pytest.mark.parametrize("kind", ["own", "hooked", "attach", "nested", "replicate"])
@on_ranks(2)
def test_an_engine_and_its_model_are_collected(kind):
    engine, model = _trained(kind)
    gc.collect()
    assert engine() is model() is None
