"""Exchanged wires in every engine: gradients are near float64, flags are right, and no rank hangs."""

from __future__ import annotations

import math

import pytest
import torch
from cases import engine, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire_cases import BF16, FEEDBACK, INT8, STOCHASTIC, WIRES, sum_bound

import pyengine as pe
from pyengine.ops.plan import BucketPlan

ALL = {**WIRES, "feedback": FEEDBACK["int8"], "stochastic": STOCHASTIC}
SHARDED = ("bf16", "int8", "feedback", "stochastic")  # the others differ from these only in the codec


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def _data(world: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(3, 7, generator=generator) for _ in range(3)] for _ in range(world)]


def _ranks_terms(world: int) -> list[list[Tensor]]:
    """Return each rank's contribution to the mean in float64, by rank and parameter."""
    twin, count = _model().double(), 9 * world
    terms = []
    for batches in _data(world):
        twin.zero_grad()
        for x in batches:
            (twin(x.double()).square().sum() / count).backward()
        terms.append([param.grad.clone() for param in twin.parameters()])
    return terms


def _is_near(name: str, grads: list[Tensor], terms: list[list[Tensor]], world: int) -> None:
    """Compare gradients with the sum of the ranks' terms; any block may hold the largest of all elements."""
    form = name if name in WIRES else "int8"
    whole = [torch.cat([part.flatten() for part in parts]) for parts in terms]
    # Stochastic rounding has twice the error of rounding to nearest. With feedback, the error is that of this
    # window and of the last one, each with values that are larger by the residual.
    bound = sum_bound(form, whole) * {"stochastic": 2, "feedback": 2.1}.get(name, 1)
    # float32: three successive products, three micro-batches and 1/count.
    bound += 32 * 2.0**-24 * sum(part.abs() for part in whole) + 2.0**-25 * world
    got = torch.cat([grad.flatten() for grad in grads]).double()
    assert ((got - sum(whole)).abs() <= bound).all(), name


def _engine(kind: str, model: nn.Module, wire: pe.wire.Wire) -> tuple[pe.Sync, nn.Module]:
    if kind not in ("flat", "hsdp"):
        return engine(kind, model, accumulate=3, wire=wire)
    names = ("replicas", "shards")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if kind == "hsdp" else None
    return pe.attach(fully_shard(model, mesh=mesh), accumulate=3, wire=wire), model


def _train(kind: str) -> list[list[Tensor]]:
    rank, world = me()
    terms, found = _ranks_terms(world), []
    for name in SHARDED if kind in ("flat", "hsdp") else ALL:
        model = _model()
        sync, forward = _engine(kind, model, ALL[name])
        sent: list[int] = []
        sync.on_step(lambda record, sent=sent: sent.append(record.bytes_on_wire))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):  # DDP rebuilds its buckets between them, and so does the engine
            for window in sync.windows(_data(world)[rank]):
                for batch in window:
                    sync.backward(forward(batch).square().sum(), count=3)
                sync.unscale_()
                grads = [param.grad for param in model.parameters()]
                found.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads])
                _is_near(name, found[-1], terms, world)
                sync.step(optimizer)
                optimizer.zero_grad()
        assert (sent[0] > 0) == (world > 1)
        sync.close()
    return found


@pytest.mark.parametrize(("kind", "world"), [("own", 1), ("own", 3), ("attach", 3), ("flat", 2), ("hsdp", 4)])
def test_gradients_are_near_float64_and_have_the_same_bits_on_every_rank(ranks, world, kind):
    first, *others = ranks(world).run(_train, kind)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(("world", "static"), [(1, False), (2, True)])
@on_ranks()
def test_the_bare_hook_averages_over_every_wire(static):
    rank, world = me()
    terms = [[3 * part for part in parts] for parts in _ranks_terms(world)]
    for name, wire in ALL.items():
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=1e-5, static_graph=static)
        ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
        for _ in range(3):
            ddp.zero_grad()
            (ddp(torch.cat(_data(world)[rank])).square().sum() / 3).backward()
            _is_near(name, [param.grad for param in ddp.parameters()], terms, world)


# The relative error of a wire, as a unit in the last place: float64 is exact unless the wire is narrow.
OTHER_TYPES = [(pe.wire.FP32(), 2.0**-52), (pe.wire.BF16(), 2.0**-7), (BF16, 2.0**-7)]


@on_ranks(2)
def test_gradients_of_other_types_travel_over_every_wire():
    _, world = me()
    for dtype in (torch.float64, torch.bfloat16):
        for wire, unit in (*OTHER_TYPES, (INT8, 1 / 60), (FEEDBACK["int8"], 1 / 60)):
            ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(dtype))
            ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
            ddp(torch.full((1, 4), 1 / 3 + me()[0], dtype=dtype)).sum().backward()
            mean, most = 1 / 3 + (world - 1) / 2, max(unit, torch.finfo(dtype).eps)
            assert ((ddp.module.weight.grad.double() - mean).abs() <= 2 * mean * most).all(), wire
            assert ddp.module.weight.grad.dtype == dtype


@on_ranks(2)
def test_sums_of_our_own_travel_over_encoded_wires():
    """Narrow gradients are summed in a separate buffer, in which 1/count and residuals are applied."""
    rank, world = me()
    for wire in (INT8, FEEDBACK["int8"], FEEDBACK["bf16"], BF16):
        model = nn.Linear(40, 1, bias=False).to(torch.bfloat16)
        sync = pe.GradSync(model, accumulate=2, wire=wire)
        for window in sync.windows([1.0, 3.0 + rank] * 2):
            for scale in window:
                sync.backward(model(torch.full((1, 40), scale, dtype=torch.bfloat16)).sum(), count=5)
            sync.unscale_()
            mean = (4 + (world - 1) / 2) / 10
            # One rounding per rank and one of the sum, with feedback of two windows, and one to bfloat16.
            assert ((model.weight.grad.double() - mean).abs() <= mean * (5 / 254 + 2.0**-7)).all(), wire
            model.weight.grad = None
        sync.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("own", {}), ("own-native", {}), ("attach", {"accumulator": "native"})],
)
@on_ranks(2)
def test_a_mean_of_bf16_gradients_is_rounded_once_and_copied_by_nobody(kind, options):
    model = nn.Linear(40, 1, bias=False).bfloat16()
    sync, forward = engine(kind, model, accumulate=2, wire=pe.wire.BF16(), **options)
    packed, pack_ = [], BucketPlan.pack_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketPlan, "pack_", lambda *args: (packed.append(args), pack_(*args)))
        for window in sync.windows(torch.ones(2, 1, 40, dtype=torch.bfloat16)):
            for x in window:
                sync.backward(forward(x).sum(), count=3)
            norm = float(sync.clip_grad_norm_(math.inf))
            sync.abandon()
    assert norm == pytest.approx(math.sqrt(40) * torch.tensor(1 / 3).bfloat16().item(), rel=1e-6)
    assert len(packed) == (kind != "own")  # only the first gradient is packed


class _Partly(nn.Module):
    """Three parameters with tiny gradients: `everywhere` is used by all ranks, `once` by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere, self.once, self.never = (nn.Parameter(torch.ones(5)) for _ in range(3))

    def forward(self, uses_once: bool) -> Tensor:
        total = self.everywhere.sum()
        return 1e-20 * (total + self.once.sum() if uses_once else total)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_flags_and_tiny_gradients_do_not_disturb_each_other(kind):
    rank, world = me()
    for wire in ALL.values():
        model = _Partly()
        sync, forward = engine(kind, model, accumulate=1, wire=wire)
        for window in sync.windows([rank == world - 1] * 2):
            for uses_once in window:
                sync.backward(forward(uses_once))
            sync.unscale_()
            assert model.never.grad is None
            assert model.once.grad is not None and model.everywhere.grad is not None
            if wire.dtype != torch.float16:  # in float16 they are 0
                assert torch.allclose(model.everywhere.grad, torch.full((5,), 1e-20), rtol=0.02, atol=0)
            model.zero_grad()
        sync.close()
