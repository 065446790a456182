"""Narrow wires under FSDP2: what is sent, which gradients result, and how far they are from float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import me, records_of
from ranks import on_ranks
from sharded_cases import Chain, shard, train_a_window
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pyengine as pe
from pyengine.gradients.fsdp.private import groups_of

# The relative error of rounding to a wire's dtype: half a unit in the last place.
ROUNDING = {"BF16()": 2.0**-8, "FP16()": 2.0**-11}
ACCUMULATE, WIDTH = 3, 7
ENGINE_COLLECTIVES = 7  # in a first window, for every model: the header and others
# A factor of losses and counts, with which gradients exceed float16 unless they are divided by the count.
LARGE = 2**20


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)).to(dtype)


def _sharded(kind: str, **options: Any) -> tuple[pe.Sync, nn.Module]:
    model, mesh = _model(torch.float32), None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    if kind != "flat":
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return pe.attach(model, accumulate=ACCUMULATE, **options), model


def _batch(rank: int, number: int) -> tuple[Tensor, int]:
    items = 1 + (rank + 2 * number) % 4
    return torch.randn(items, 5, generator=torch.Generator().manual_seed(100 * rank + number)), items


def _right(world: int) -> list[tuple[Tensor, Tensor]]:
    """Return the mean gradients of one float64 process, and the sums of absolute values of their terms."""
    twin = _model(torch.float64)
    members = [_batch(rank, number) for rank in range(world) for number in range(ACCUMULATE)]
    count = sum(items for _, items in members)
    sums = [(torch.zeros_like(param), torch.zeros_like(param)) for param in twin.parameters()]
    for x, _ in members:
        twin.zero_grad()
        (twin(x.double()).square().sum() / count).backward()
        for (total, magnitude), param in zip(sums, twin.parameters(), strict=True):
            total += param.grad
            magnitude += param.grad.abs()
    return sums


def _train(
    kind: str, wire: pe.wire.Wire, *, factor: int = 1, **options: Any
) -> tuple[nn.Module, Tensor, pe.StepRecord]:
    """Train a window with losses and counts times `factor`; return the model, its norm and the record."""
    rank, _ = me()
    sync, model = _sharded(kind, wire=wire, **options)
    records = records_of(sync)
    for window in sync.windows([_batch(rank, number) for number in range(ACCUMULATE)]):
        for x, items in window:
            sync.backward(factor * model(x).square().sum(), count=factor * items)
        norm = sync.grad_norm()
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
        sync.unscale_()
    return model, norm, records[0]


def _ends_near_float64(kind: str, wire: pe.wire.Wire, options: dict[str, Any]) -> dict[str, Tensor]:
    """Check that gradients are near the whole batch's in float64; return this rank's shards."""
    model, norm, _ = _train(kind, wire, factor=LARGE, **options)
    right, deviation = _right(me()[1]), 0.0
    for param, (total, magnitude) in zip(model.parameters(), right, strict=True):
        # A value that is sent, a rank's sum or a micro-batch's gradient, is rounded once, by a relative u.
        # float32 rounds at most 32 times: products, sums over micro-batches and ranks, and 1/count.
        # Near 0 float16 has steps of 2^-24.
        bound = (ROUNDING[str(wire)] + 32 * 2.0**-24) * magnitude + 2.0**-25
        assert ((param.grad.full_tensor().double() - total).abs() <= bound).all()
        deviation += float(bound.square().sum())
    squares = sum(float(total.square().sum()) for total, _ in right)
    assert abs(float(norm) - squares**0.5) <= deviation**0.5  # the triangle inequality
    return {name: param.grad.to_local() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "world", "wire", "options"),
    [
        ("flat", 2, pe.wire.FP16(), {}),
        ("flat", 3, pe.wire.BF16(), {"defer": "none"}),
        ("nested", 2, pe.wire.BF16(), {}),
        ("hsdp", 4, pe.wire.BF16(), {"defer": "outer"}),
    ],
    ids=str,
)
def test_a_narrow_wire_rounds_once_a_rank(ranks, kind, world, wire, options):
    found = ranks(world).run(_ends_near_float64, kind, wire, options)
    if kind == "hsdp":  # replicas are ranks 0 and 2, 1 and 3
        for name, grad in found[0].items():
            assert torch.equal(grad, found[2][name])


def _sends(kind: str, wire: pe.wire.Wire) -> tuple[int, int]:
    """Return the bytes and the collectives of a window, including its all-gathers and header."""
    _, _, record = _train(kind, wire, defer="all")
    return record.bytes_on_wire, record.collectives


# FSDP's collectives in a window of three micro-batches: all-gathers in forwards, for the inner unit in
# backwards too; one reduce-scatter per unit; with hsdp also one all-reduce per unit.
@pytest.mark.parametrize(
    ("kind", "world", "collectives"),
    [("flat", 3, 3 + 1), ("nested", 2, 3 * 3 + 2), ("hsdp", 4, 3 * 3 + 2 + 2)],
)
def test_gradients_travel_as_narrow_as_the_record_says(ranks, kind, world, collectives):
    shards = 2 if kind == "hsdp" else world
    shapes = [(WIDTH, 5), (WIDTH, 1), (3, WIDTH), (3, 1)]
    numel = sum(-(-rows // shards) * shards * columns for rows, columns in shapes)  # rows are padded
    wide = ranks(world).run(_sends, kind, pe.wire.FP32())
    narrow = ranks(world).run(_sends, kind, pe.wire.BF16())
    encoded = ranks(world).run(_sends, kind, pe.wire.Int8(block=32))
    for (before, launched), (after, also), (least, _) in zip(wide, narrow, encoded, strict=True):
        assert before - after == 2 * numel * (shards - 1) // shards
        assert launched == also == collectives + ENGINE_COLLECTIVES and least < after


@on_ranks(2)
def test_what_overflows_on_the_wire_skips_the_step_everywhere():
    rank, _ = me()
    sync, model = _sharded("flat", wire=pe.wire.FP16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepped = []
    for window in sync.windows([_batch(rank, number) for number in range(2 * ACCUMULATE)]):
        for x, items in window:
            factor = 1e9 if rank == 1 and not stepped else 1.0
            sync.backward(factor * model(x).square().sum(), count=items)
        stepped.append(bool(sync.step(optimizer)))
    assert stepped == [False, True]


@on_ranks(1)
def test_one_rank_sends_nothing_and_rounds_nothing():
    sync, model = _sharded("flat", wire=pe.wire.FP16())
    x, items = _batch(0, 0)
    with sync.accumulate(last=True):
        sync.backward(1e6 * model(x).square().sum(), count=items)
    sync.unscale_()
    twin = _model(torch.float32)
    (1e6 * twin(x).square().sum()).backward()
    inverse = torch.tensor(1 / items)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), other.grad * inverse)


class _Own:
    """The caller's own reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


REFUSED = {
    "replicas": "reduces in float32, but wire=BF16(): it has replicas and no shards",
    "only replicas": "reduces in float32, but wire=BF16(): it has replicas and no shards",
    "wider": "reduces in bfloat16, but wire=FP32(): expected a wire with the reduce_dtype",
    "early": "wire=FP16() for unit '', which sends gradients before the window's count is known",
    "a hook": "which has no reduce_scatter: pass the wire of torch.float32",
    "own": "it has a custom reduce-scatter",
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_a_wire_that_units_cannot_use_is_refused_on_every_rank(case):
    model, options = Chain(), {"wire": pe.wire.BF16()}
    match case:
        case "replicas":
            shard(model, "replicate")
        case "only replicas":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))
        case "wider":
            options["accumulator"] = "native"
            fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
            options["wire"] = pe.wire.FP32()
        case "early":
            fully_shard(model)
            options = {"wire": pe.wire.FP16(), "defer": "none"}
        case "a hook":
            fully_shard(model)
            options["wire"] = pe.wire.FromHook(allreduce_hook)
        case "own":
            fully_shard(model).set_custom_reduce_scatter(_Own())
    with pytest.raises(ValueError) as error:
        pe.attach(model, accumulate=3, **options)
    assert REFUSED[case] in str(error.value)


@on_ranks(2)
def test_a_reduce_scatter_of_the_callers_goes_on_to_be_used():
    model = Chain()
    own = _Own()
    fully_shard(model).set_custom_reduce_scatter(own)
    sync = pe.attach(model, accumulate=3)
    train_a_window(sync, model)
    sync.close()
    assert groups_of(model)[0]._reduce_scatter_comm is own
