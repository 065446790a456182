"""PowerSGD as a wire: near its algorithm in float64, the same bits on all ranks, in states, near torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import engine, me
from marks import rest
from power_cases import SHAPES, Reference, Told, as_matrix, gradients, is_sent_thin, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm import comm_for
from pyengine.wire.memory import BucketMemory, Place

# float32's roundings in M Q and its transpose, of up to 75 terms each, against what a matrix is; the noise
# that the directions also follow is some hundred times smaller than it, so they may turn by as many times.
NEAR = 1e-4
WINDOWS = 5


def _is_near(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, want in right.items():
        far = (as_matrix(name, got[name].double()) - want).norm()
        assert far <= NEAR * want.norm(), (name, float(far / want.norm()))


def _terms(world: int, window: int) -> list[dict[str, Tensor]]:
    return [{name: g / world for name, g in gradients(r, window).items()} for r in range(world)]


def _engines(kind: str) -> list[dict[str, Tensor]]:
    rank, world = me()
    found = []
    for columns in (1, 2, 4):
        model = Told(rank)
        sync, forward = engine(kind, model, accumulate=1, wire=pe.wire.PowerSGD(columns))
        right = Reference(world, columns)
        for window, got in enumerate(train(sync, forward, model, range(WINDOWS))):
            terms = _terms(world, window)
            if world == 1:  # nothing travels, and nothing is lost
                _is_near(got, {name: as_matrix(name, g.double()) for name, g in terms[0].items()})
            else:
                _is_near(got, right.sum(terms))
            found.append(got)
        kept = sync.state_dict()[f"rank {rank} of {world}"][0]
        thin = {name for name in SHAPES if is_sent_thin(name, columns)}
        assert kept.get("factors", {}).keys() == (thin if world > 1 else set())
        sync.close()
    return found


@pytest.mark.parametrize(
    ("kind", "world"),
    [("own", 1), ("own", 2), ("attach", 2), ("own", 4), *rest(("own", 3), ("attach", 4), ("attach-view", 3))],
)
def test_windows_are_near_the_algorithm_in_float64_with_the_same_bits_on_all_ranks(ranks, kind, world):
    first, *others = ranks(world).run(_engines, kind)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


def _hook() -> list[dict[str, Tensor]]:
    """DDP alone lays its buckets out anew behind the first window."""
    rank, world = me()
    model, right, found = Told(rank), Reference(world, 2), []
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    ddp.register_comm_hook(pe.HookState(wire=pe.wire.PowerSGD(2)), pe.comm_hook)
    for window in range(WINDOWS):
        ddp.zero_grad()
        ddp(window).backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        _is_near(found[-1], right.sum(_terms(world, window)))
    return found


def test_the_bare_hook_is_the_same_algorithm_across_rebuilt_buckets(ranks):
    first, second = ranks(2).run(_hook)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


def _in_shared_memory() -> None:
    rank, world = me()
    model, right = Told(rank), Reference(world, 2)
    sync = pe.GradSync(model, accumulate=1, wire=pe.wire.PowerSGD(2), shared_memory=True)
    for window, got in enumerate(train(sync, model, model, range(3))):
        _is_near(got, right.sum(_terms(world, window)))


def test_ranks_of_one_host_sum_in_memory_that_they_share(ranks):
    ranks(3).run(_in_shared_memory)


def _narrow(kind: str) -> None:
    """Parameters in bfloat16, sums in float32."""
    rank, world = me()
    model = Told(rank).bfloat16()
    sync, forward = engine(kind, model, accumulate=1, wire=pe.wire.PowerSGD(2))
    (got,) = train(sync, forward, model, [0])
    narrow = [{n: g.bfloat16() / world for n, g in gradients(r, 0).items()} for r in range(world)]
    right = Reference(world, 2).sum(narrow)
    for name, want in right.items():  # the result is rounded to bfloat16, too
        assert (as_matrix(name, got[name].double()) - want).norm() <= (NEAR + 2.0**-8) * want.norm()


def test_narrow_parameters_are_sent_from_float32(ranks):
    ranks(2).run(_narrow, "own")


def _bytes() -> None:
    rank, world = me()
    comm, model = comm_for(torch.device("cpu"), None), Told(rank)
    places, offset = [], 0
    for name, param in model.named_parameters():
        places.append(Place(name, offset, param.numel(), param))
        offset += param.numel()
    wire = pe.wire.PowerSGD(2)
    bound = wire.for_bucket(BucketMemory(0, offset, torch.device("cpu"), places))
    before = comm.traffic.bytes_sent
    bound.all_reduce_(torch.ones(offset), comm).wait()
    sent = comm.traffic.bytes_sent - before
    thin = [as_matrix(n, torch.zeros(SHAPES[n])).shape for n in SHAPES if is_sent_thin(n, 2)]
    others = sum(torch.Size(SHAPES[n]).numel() for n in SHAPES if not is_sent_thin(n, 2))
    numel = others + sum(2 * (rows + columns) for rows, columns in thin)
    assert sent == bound.bytes_on_wire(offset, world)
    assert abs(sent - 2 * (world - 1) * 4 * numel / world) <= 2  # each of two collectives rounds
    with pytest.raises(
        ValueError, match=r"wire=PowerSGD\(rank=2\): what 5 elements over 2 ranks send depends"
    ):
        wire.bytes_on_wire(5, 2)
    with pytest.raises(RuntimeError, match="was given no memory for it"):
        wire.all_reduce_(torch.ones(4), comm)


@pytest.mark.parametrize("world", [1, 3])
def test_it_sends_what_it_says(ranks, world):
    ranks(world).run(_bytes)


def _not_finite(kind: str, bad: float) -> None:
    """One value on one rank: no rank steps, and the next window is as if directions had not seen it."""
    rank, world = me()
    model = Told(rank)
    sync, forward = engine(kind, model, accumulate=1, wire=pe.wire.PowerSGD(2))
    train(sync, forward, model, [0])
    own = f"rank {rank} of {world}"
    before = sync.state_dict()[own][0]["factors"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows([1]):
        for number in window:
            loss = forward(number)
            if rank == 1:
                loss = loss + bad * model.wide[3, 5]
            sync.backward(loss)
        assert not bool(sync.step(optimizer))
        assert not model.wide.grad.isfinite().all() and model.conv.grad.isfinite().all()
        optimizer.zero_grad()
    kept = sync.state_dict()[own][0]
    assert not any(part.any() for part in kept["residuals"].values())
    assert all(factor.isfinite().all() for factor in kept["factors"].values())
    assert torch.equal(kept["factors"]["wide"], before["wide"])
    (got,) = train(sync, forward, model, [2])
    assert all(grad.isfinite().all() for grad in got.values())


@pytest.mark.parametrize(("kind", "bad"), [("own", float("inf")), ("attach", float("nan"))])
def test_what_is_not_finite_is_seen_by_all_and_changes_nothing_that_is_kept(ranks, kind, bad):
    ranks(2).run(_not_finite, kind, bad)


def _hook_not_finite() -> None:
    rank, world = me()
    model = Told(rank)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(pe.HookState(wire=pe.wire.PowerSGD(2)), pe.comm_hook)
    for window in range(2):  # behind the first one buckets are laid out anew
        ddp.zero_grad()
        (ddp(window) + (float("inf") * model.wide[3, 5] if rank == window else 0)).backward()
        assert not model.wide.grad.isfinite().all() and model.conv.grad.isfinite().all()
    ddp.zero_grad()
    ddp(2).backward()
    right = Reference(world, 2).sum(_terms(world, 2))
    _is_near({"wide": model.wide.grad}, {"wide": right["wide"]})  # of first directions, without residuals


def test_the_bare_hook_keeps_nothing_of_what_is_not_finite(ranks):
    ranks(2).run(_hook_not_finite)


def _nothing_then_something() -> None:
    """Directions in which a window has nothing are looked in again."""
    rank, world = me()
    model = Told(rank)
    sync, forward = engine("own", model, accumulate=1, wire=pe.wire.PowerSGD(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows([0, 0]):
        for number in window:
            sync.backward(0 * forward(number))
        assert bool(sync.step(optimizer))
        assert not any(param.grad.any() for param in model.parameters())
        optimizer.zero_grad()
    (got,) = train(sync, forward, model, [1])
    _is_near(got, Reference(world, 2).sum(_terms(world, 1)))


def test_a_window_of_zeros_loses_no_direction(ranks):
    ranks(2).run(_nothing_then_something)


def _lacks(made: Any) -> float:
    """Return how far the sum of 30 equal windows is from the true one."""
    model = Told(me()[0])
    forward, step = made(model)
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for _ in range(30):
        for name, grad in step(forward, model).items():
            total[name] += grad.double()
    right = _right()
    return sum(float((total[name] - 30 * right[name]).norm() ** 2) for name in SHAPES) ** 0.5


def _right() -> dict[str, Tensor]:
    return {name: sum(term[name].double() for term in _terms(me()[1], 0)) for name in SHAPES}


def _ours(model: Told) -> tuple[nn.Module, Any]:
    sync, forward = engine("own", model, accumulate=1, wire=pe.wire.PowerSGD(4))
    return forward, lambda forward, model: train(sync, forward, model, [0])[0]


def _torchs(model: Told) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(model)
    # Its first two windows are whole, and its buckets laid out anew behind the first.
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=2)
    ddp.register_comm_hook(state, powerSGD_hook)

    def step(forward: nn.Module, model: Told) -> dict[str, Tensor]:
        model.zero_grad()
        forward(0).backward()
        return {name: param.grad.clone() for name, param in model.named_parameters()}

    for _ in range(2):
        step(ddp, model)
    return ddp, step


def _compared() -> tuple[float, float, float]:
    """Return what our sum lacks, torch's, and of one window the best approximation of that rank (Eckart and
    Young).
    """
    thin = [as_matrix(name, grad) for name, grad in _right().items() if is_sent_thin(name, 4)]
    best = sum(float(torch.linalg.svdvals(matrix)[4:].square().sum()) for matrix in thin) ** 0.5
    return _lacks(_ours), _lacks(_torchs), best


def test_what_thirty_windows_lack_does_not_add_up_and_is_no_more_than_over_torchs_hook(ranks):
    for ours, torchs, best in ranks(2).run(_compared):
        assert ours <= 30 * best / 4  # without residuals at least 30 * best
        assert ours <= 1.1 * torchs


def _refused(case: str) -> str:
    model = nn.Linear(8, 8)
    with pytest.raises((ValueError, TypeError)) as error:
        match case:
            case "sharded":
                pe.attach(fully_shard(model), accumulate=1, wire=pe.wire.PowerSGD())
            case "exact":
                pe.GradSync(model, accumulate=1, accumulator="exact", wire=pe.wire.PowerSGD())
            case "levels":
                pe.wire.Hierarchical(inter=pe.wire.PowerSGD())
            case "feedback":
                pe.wire.ErrorFeedback(pe.wire.PowerSGD())
            case "rank":
                pe.wire.PowerSGD(0)
            case "ratio":
                pe.wire.PowerSGD(min_ratio=0.5)
    return str(error.value)


REFUSED = {
    "sharded": "reduces in float32, and wire=PowerSGD(), which has no reduce_scatter",
    "exact": "wire=PowerSGD()",
    "levels": "inter=PowerSGD(): need a wire of one level",
    "feedback": "wire=PowerSGD(): need a wire that is rounded where its rank can see it",
    "rank": "rank=0: need a whole number of at least 1",
    "ratio": "min_ratio=0.5: need a number of at least 1",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused(ranks, case):
    for message in ranks(2).run(_refused, case):
        assert REFUSED[case] in message


def _under_autocast(is_inside: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    sync = pe.GradSync(model, accumulate=1, wire=pe.wire.PowerSGD(2))
    for window in sync.windows([torch.randn(4, 16)]):
        for x in window:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_inside):
                sync.backward(loss)
        sync.unscale_()
        assert model.weight.grad is not None
        return model.weight.grad.clone()
    raise AssertionError


def test_a_backward_under_autocast_changes_no_product(ranks):
    inside, outside = (ranks(2).run(_under_autocast, is_inside) for is_inside in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
