"""Exchanged wires in every engine: gradients near float64, flags as they are, and nobody hangs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import (
    Breaks,
    Inject,
    Integers,
    assert_same,
    comm_of_buckets,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
)
from marks import rest
from test_failed_collectives import Broken
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from wire_cases import BF16, FEEDBACK, INT8, STOCHASTIC, WIRES, sum_bound

import pyengine as pe
from pyengine.ops.plan import BucketPlan

KINDS = ("own", "own-native", "attach", "attach-view")
ALL = {**WIRES, "feedback": FEEDBACK["int8"], "stochastic": STOCHASTIC}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def _data(world: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(3, 7, generator=generator) for _ in range(3)] for _ in range(world)]


def _ranks_terms(model: nn.Module, world: int) -> list[list[Tensor]]:
    """Return by rank and parameter what it brings to the mean, in float64."""
    twin, count = copy.deepcopy(model).double(), 9 * world
    terms = []
    for batches in _data(world):
        twin.zero_grad()
        for x in batches:
            (twin(x.double()).square().sum() / count).backward()
        terms.append([param.grad.clone() for param in twin.parameters()])
    return terms


def _is_near(name: str, model: nn.Module, terms: list[list[Tensor]], world: int) -> None:
    """Compare `.grad` with the sum of what ranks bring: any block may hold the largest of all elements."""
    form = name if name in WIRES else "int8"
    whole = [torch.cat([part.flatten() for part in parts]) for parts in terms]
    # Up or down by chance is twice as far as to nearest. Feedback: what this window loses, and what the last
    # one has lost, each of values that are larger by as much.
    bound = sum_bound(form, whole) * {"stochastic": 2, "feedback": 2.1}.get(name, 1)
    # float32: three products in a row, three micro-batches and 1/count.
    bound += 32 * 2.0**-24 * sum(part.abs() for part in whole) + 2.0**-25 * world
    got = torch.cat([param.grad.flatten() for param in model.parameters()]).double()
    assert ((got - sum(whole)).abs() <= bound).all(), name


def _train(kind: str) -> list[list[Tensor]]:
    rank, world = me()
    found = []
    for name, wire in ALL.items():
        model = _model()
        sync, forward = engine(kind, model, accumulate=3, wire=wire)
        sent: list[int] = []
        sync.on_step(lambda record, sent=sent: sent.append(record.bytes_on_wire))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):  # DDP lays its buckets out anew between them, and so do we
            for window in sync.windows(_data(world)[rank]):
                for batch in window:
                    sync.backward(forward(batch).square().sum(), count=3)
                sync.unscale_()
                _is_near(name, model, _ranks_terms(model, world), world)
                found.append([param.grad.clone() for param in model.parameters()])
                sync.step(optimizer)
        assert (sent[0] > 0) == (world > 1)
        sync.close()
    return found


@pytest.mark.parametrize("world", [1, 2, *rest(3), 4])
@pytest.mark.parametrize("kind", ["own", "attach", *rest("own-native", "attach-view")])
def test_gradients_are_near_float64_and_have_the_same_bits_on_every_rank(ranks, world, kind):
    first, *others = ranks(world).run(_train, kind)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _hook(static: bool) -> None:
    rank, world = me()
    for name, wire in ALL.items():
        model = _model()
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1e-5, static_graph=static)
        ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
        terms = [[3 * part for part in parts] for parts in _ranks_terms(model, world)]
        for _ in range(3):
            ddp.zero_grad()
            (ddp(torch.cat(_data(world)[rank])).square().sum() / 3).backward()
            _is_near(name, ddp.module, terms, world)


@pytest.mark.parametrize("world", [1, 2, *rest(3, 4)])
@pytest.mark.parametrize("static", [False, True])
def test_the_bare_hook_averages_over_every_wire(ranks, world, static):
    ranks(world).run(_hook, static)


def _float64_and_bf16() -> None:
    _, world = me()
    for dtype in (torch.float64, torch.bfloat16):
        for wire in (INT8, FEEDBACK["int8"], BF16):
            ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(dtype))
            ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
            ddp(torch.full((1, 4), 2.0 + me()[0], dtype=dtype)).sum().backward()
            mean = 2 + (world - 1) / 2
            assert ((ddp.module.weight.grad.double() - mean).abs() <= mean / 60).all()
            assert ddp.module.weight.grad.dtype == dtype


def test_gradients_of_other_types_travel_over_an_encoded_wire(ranks):
    ranks(2).run(_float64_and_bf16)


def _sums_of_our_own() -> None:
    """Sums beside `.grad`, of narrow parameters and of wide ones: 1/count and residuals come in."""
    rank, world = me()
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"nonfinite": "drop_micro_batch"})):
        for wire in (INT8, FEEDBACK["int8"], FEEDBACK["bf16"], BF16):
            model = nn.Linear(40, 1, bias=False).to(dtype)
            sync = pe.GradSync(model, accumulate=2, wire=wire, **options)
            for window in sync.windows([1.0, 3.0 + rank] * 2):
                for scale in window:
                    sync.backward(model(torch.full((1, 40), scale, dtype=dtype)).sum(), count=5)
                sync.unscale_()
                mean = (4 + (world - 1) / 2) / 10
                # Of one rounding a rank and one of the sum; with feedback of two windows; and of bfloat16.
                assert ((model.weight.grad.double() - mean).abs() <= mean * (5 / 254 + 2.0**-7)).all(), wire
                model.weight.grad = None
            sync.close()


@pytest.mark.parametrize("world", [1, 2])
def test_sums_of_our_own_travel_over_encoded_wires(ranks, world):
    ranks(world).run(_sums_of_our_own)


def _mean_of_bf16(kind: str, options: dict[str, str]) -> tuple[float, int]:
    """Return the norm of a mean that bfloat16 rounds, of a sum that it holds, and the copies."""
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
    return norm, len(packed)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("own", {}), ("own-native", {}), ("attach", {"accumulator": "native"})),
        *rest(("attach", {}), ("attach-view", {}), ("attach-view", {"accumulator": "native"})),
    ],
)
def test_a_mean_of_bf16_gradients_is_rounded_once_and_copied_by_nobody(ranks, kind, options):
    for norm, num_packed in ranks(2).run(_mean_of_bf16, kind, options):
        assert norm == pytest.approx(math.sqrt(40) * torch.tensor(1 / 3).bfloat16().item(), rel=1e-6)
        assert num_packed == (kind == "own-native")  # the first micro-batch's gradient


class _Partly(nn.Module):
    """Three parameters with tiny gradients: `everywhere` is used by all ranks, `once` by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere, self.once, self.never = (nn.Parameter(torch.ones(5)) for _ in range(3))

    def forward(self, uses_once: bool) -> Tensor:
        total = self.everywhere.sum()
        return 1e-20 * (total + self.once.sum() if uses_once else total)


def _flags(kind: str) -> None:
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
            if wire.dtype != torch.float16:  # in which these are 0
                assert torch.allclose(model.everywhere.grad, torch.full((5,), 1e-20), rtol=0.02, atol=0)
            for param in model.parameters():
                param.grad = None
        sync.close()


@pytest.mark.parametrize("kind", [*KINDS[:1], *rest(KINDS[1]), KINDS[2]])
def test_flags_and_tiny_gradients_do_not_disturb_each_other(ranks, kind):
    ranks(2).run(_flags, kind)


def _skips(kind: str) -> list[list[bool]]:
    """Rank 1 brings inf in the second window, and gives the fourth up."""
    rank, world = me()
    found = []
    for name in ("int8", "feedback", "bf16"):
        model = _model()
        sync, forward = engine(kind, model, accumulate=1, wire=ALL[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stepped = []
        for number in range(6):
            Breaks.now = (number, rank) == (3, 1)
            x = torch.full((2, 7), 0.25)
            factor = torch.inf if (number, rank) == (1, 1) else 1.0
            try:
                with sync.accumulate():
                    out = Breaks.apply(Inject.apply(forward(x), factor))
                    sync.backward(out.square().sum(), count=2)
                stepped.append(bool(sync.step(optimizer)))
            except MemoryError:
                stepped.append(False)
                sync.abandon()
            if stepped[-1]:
                assert all(param.grad.isfinite().all() for param in model.parameters())
            state = sync.state_dict()[f"rank {rank} of {world}"][0]
            kept = state.get("residuals", {})
            assert bool(kept) == (name == "feedback")
            # Of a window that was not used nothing stays.
            assert all(bool((part == 0).all()) != stepped[-1] or part.numel() < 9 for part in kept.values())
        sync.close()
        found.append(stepped)
    return found


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_window_that_is_not_used_leaves_nothing_behind(ranks, kind):
    for found in ranks(2).run(_skips, kind):
        assert found == [[True, False, True, False, True, True]] * 3


def _break(comm: Any, name: str) -> None:
    """Let one of the two exchanges fail from now on."""
    setattr(comm, name, lambda *_: Broken())


def _fails(kind: str, exchange: str) -> None:
    ddp = kind != "own"
    model = _model()
    if kind == "hook":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        state = pe.HookState(wire=INT8)
        wrapped.register_comm_hook(state, pe.comm_hook)
        _break(state.comm(torch.device("cpu")), exchange)
        with pytest.raises(RuntimeError, match="connection lost"):
            wrapped(torch.ones(1, 7)).sum().backward()
        return
    options = {} if ddp else {"bucket_cap_mb": 1e-5}
    sync, forward = engine(kind, model, accumulate=1, wire=INT8, **options)
    reducer = sync._engine.reducer
    _break(reducer.state.comm(torch.device("cpu")) if ddp else reducer._groups.comms[0], exchange)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for _ in range(2):
        try:
            with sync.accumulate():
                sync.backward(forward(torch.ones(1, 7)).sum())
            sync.step(optimizer)
        except RuntimeError as error:
            errors.append(str(error))
    assert "connection lost" in errors[0] and len(errors) == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("kind", ["own", "attach", "hook"])
def test_an_exchange_that_fails_raises_and_nothing_is_stepped(ranks, kind, exchange):
    ranks(2).run(_fails, kind, exchange)


class _Stream:
    """Stands for the stream beside the backward."""

    @contextmanager
    def run(self, tensors: list[Tensor]) -> Iterator[None]:
        yield


def _on_the_side(kind: str) -> None:
    """A transport whose stream waits: the rounds of a bucket are all there when the host has given them."""
    rank, world = me()
    model = Integers(torch.float32)
    options = {"bucket_cap_mb": 1e-5} if kind == "own" else {}
    sync, forward = engine(kind, model, accumulate=2, wire=BF16, **options)
    comm = comm_of_buckets(sync)
    sync._engine.comm.is_stream_ordered = comm.is_stream_ordered = True
    comm._side_stream = _Stream()
    for _ in range(2):
        for window in sync.windows([integers(2 * rank + k) for k in range(2)]):
            for batch in window:
                sync.backward(forward(*batch), count=4)  # 1 / (8 world) is a power of two
            sync.unscale_()
        right = mean_of_integers(model, [integers(k) for k in range(2 * world)], 8.0 * world)
        assert_same(grads(model), right)
        for param in model.parameters():
            param.grad = None


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_where_streams_wait_the_host_gives_them_all_rounds(ranks, kind):
    ranks(2).run(_on_the_side, kind)
