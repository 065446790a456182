"""An engine over FSDP2 apart from windows: states, kept gradients, other loops, refusals and `close`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, me
from ranks import on_ranks
from sharded_cases import (
    KINDS,
    Chain,
    assert_trains_a_window,
    batch,
    loss_of,
    own_batches,
    right_grads,
    right_window,
    shard,
    sharded,
    train_a_window,
    whole_grads,
    windows_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import pyengine as pe
from pyengine.gradients.fsdp.private import groups_of, reduce_dtype


@pytest.mark.parametrize(("kind", "world"), [("flat", 3), ("replicate", 2)])
@on_ranks()
def test_gradients_that_are_left_count_into_the_next_window(kind):
    """This also holds for gradients that were restored from a state."""
    sync, model = sharded(kind)
    train_a_window(sync, model)
    first = whole_grads(model)
    state = sync.state_dict()
    model.zero_grad()
    sync.load_state_dict(state)
    assert_same(whole_grads(model), first)
    for _ in windows_of(sync, model, own_batches(3)):
        norm = sync.grad_norm()
        sync.unscale_()
    want = {name: None if grad is None else grad + grad for name, grad in first.items()}
    assert_same(whole_grads(model), want)
    squares = sum(grad.double().square().sum() for grad in want.values() if grad is not None)
    torch.testing.assert_close(norm, squares.sqrt(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("kind", "world"), [("hsdp", 4), ("replicate", 2)])
@on_ranks()
def test_the_inf_norm_and_values_are_clipped_over_shards(kind):
    values = [grad for grad in right_window().values() if grad is not None]
    largest = max(grad.abs().max() for grad in values)
    sync, model = sharded(kind)
    for _ in windows_of(sync, model, own_batches(3)):
        norm = sync.clip_grad_norm_(10.0, float("inf"))
        torch.testing.assert_close(norm, largest.double(), rtol=2**-23, atol=0)
        sync.clip_grad_value_(0.25 * float(largest))
        clipped = [grad.clamp(-0.25 * float(largest), 0.25 * float(largest)) for grad in values]
        squares = sum(grad.double().square().sum() for grad in clipped)
        torch.testing.assert_close(sync.grad_norm(), squares.sqrt(), rtol=1e-6, atol=0)
        sync.unscale_()


@pytest.mark.parametrize(("kind", "world", "fused"), [("nested", 2, False), ("hsdp", 4, True)])
@on_ranks()
def test_optimizers_step_shards_in_a_loop_that_is_not_nested(kind, fused):
    _, world = me()
    twin = Chain(torch.float64)
    theirs = torch.optim.AdamW([p for n, p in twin.named_parameters() if "never" not in n], lr=0.1)
    sync, model = sharded(kind)
    optimizer = sync.wrap(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    for number, data in enumerate(own_batches(6)):
        with sync.accumulate():
            sync.backward(loss_of(model, data), count=3)
        optimizer.step()
        if number % 3 == 2:
            theirs.zero_grad()
            for rank in range(world):
                for k in range(number - 2, number + 1):
                    x, t = batch(100 * rank + k)
                    (loss_of(twin, (x.double(), t.double())) / (9 * world)).backward()
            theirs.step()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name not in ("sometimes", "first.never"):
            torch.testing.assert_close(param.full_tensor().double(), other.detach(), rtol=1e-5, atol=1e-5)
        else:
            assert (param.full_tensor() == 1).all()  # unused: no weight decay either


@pytest.mark.parametrize(("kind", "world"), KINDS)
@on_ranks()
def test_a_closed_engine_leaves_the_units_as_they_were(kind):
    """After `close`, the units again reduce in every backward, to the mean over ranks."""
    rank, world = me()
    sync, model = sharded(kind)
    train_a_window(sync, model)
    sync.close()
    model.zero_grad()
    loss_of(model, batch(100 * rank)).backward()
    want = right_grads([batch(100 * r) for r in range(world)], world)
    got = whole_grads(model)
    for name in ("first.weight", "second.weight", "second.bias", "scale"):
        torch.testing.assert_close(got[name], want[name])
    assert_trains_a_window(pe.attach(model, accumulate=3), model)


@on_ranks(2)
def test_shards_on_the_host_are_taken_where_the_model_computes_there():
    model = fully_shard(Chain(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_trains_a_window(pe.attach(model, accumulate=3), model)


@on_ranks(2)
def test_parameters_that_fsdp_ignores_are_the_callers_who_may_step_them_alone():
    model = Chain()
    fully_shard(model, ignored_params={model.scale})
    sync = pe.attach(model, accumulate=3)
    for data in own_batches(3):
        with sync.accumulate():
            sync.backward(loss_of(model, data), count=3)
    sync.unscale_()
    assert torch.equal(model.second.weight.grad.full_tensor(), right_window()["second.weight"])
    assert sync.step(torch.optim.SGD([model.scale], lr=0.0))


REFUSED = {
    "sums": "sums gradients in bfloat16, and accumulator='fp32' asks for float32",
    "fp16": "reduces in float16",
    "exact": "defer_budget_mb=1.0: accumulator='exact' holds unsharded sums",
    "offload": "has a CPUOffloadPolicy",
    "hook": "has a hook after its reduction",
    "sparse": "1 has sparse=True",
    "mesh": "is on a mesh of ranks",
    "part": "expected a DistributedDataParallel, or a model to which fully_shard",
    "inner": "part of a larger sharded model",
    "shared memory": "rank 1: shared_memory=True, and ddp_model is sharded by FSDP2",
    "one rank": "rank 1: defer='none', defer_budget_mb=None: accumulator='exact' holds unsharded sums",
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_cannot_be_driven_is_refused_on_every_rank(case):
    model, options = Chain(), {}
    match case:
        case "sums":
            fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        case "fp16":
            fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
            options = {"accumulator": "native", "wire": pe.wire.FP16()}
        case "exact":
            fully_shard(model)
            options = {"accumulator": "exact", "defer_budget_mb": 1.0}
        case "offload":
            fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
            # As on a machine with an accelerator.
            groups_of(model)[0].device = torch.device("meta")
        case "hook":
            fully_shard(model).set_all_reduce_hook(lambda reduced: None)
        case "sparse":
            model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2, sparse=True)))
        case "mesh":
            # Every rank has a mesh of its own.
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        case "part":
            fully_shard(model.first)
        case "inner":
            fully_shard(model.first)
            fully_shard(model)
            loss_of(model, batch(0))
            model = model.first
        case "shared memory":
            fully_shard(model)
            options = {"shared_memory": bool(dist.get_rank())}
        case "one rank":
            fully_shard(model)
            options = {"accumulator": "exact", "defer": "none"} if dist.get_rank() else {}
    with pytest.raises((TypeError, ValueError)) as error:
        pe.attach(model, accumulate=3, **options)
    assert REFUSED[case] in str(error.value)


class _Spied(DefaultReduceScatter):
    """A reduce-scatter that records the dtype of its input."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, **options: Any) -> Any:
        self.seen.append(input_tensor.dtype)
        return super().__call__(output_tensor, input_tensor, **options)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32])
@on_ranks(2)
def test_the_dtype_of_sums_is_the_one_that_torch_reduces_in(compute, reduce):
    model, spied = Chain(), _Spied()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))
    model.set_custom_reduce_scatter(spied)
    loss_of(model, batch(0)).backward()
    assert spied.seen == [reduce_dtype(model)]


@pytest.mark.parametrize("number", [1, 3], ids=["of this window", "of the next one"])
@on_ranks(2)
def test_a_loader_that_raises_on_one_rank_is_known_to_all(number):
    rank, _ = me()
    sync, model = sharded("flat")

    def loader():
        for index in range(4):
            if rank and index == number:
                raise OSError("disk")
            yield batch(index)

    error, message = (OSError, "^disk$") if rank else (ValueError, "^rank 1: the loader raised OSError")
    with pytest.raises(error, match=message):
        for _ in windows_of(sync, model, loader()):
            pass
    assert_trains_a_window(sync, model)


@on_ranks(2)
def test_an_optimizer_made_before_the_model_was_sharded_is_refused():
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = pe.attach(shard(model, "flat"), accumulate=3)
    next(windows_of(sync, model, own_batches(3)))
    with pytest.raises(ValueError, match="has none of this engine's parameters"):
        sync.step(optimizer)
