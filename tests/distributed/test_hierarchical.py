"""Sums in two levels: near float64, the same bits on every rank, on hosts of any shape."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Integers, assert_alike, engine, error_of, me, rings_only, windows_of_integers
from marks import rest
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire_cases import INT8, WIRES, of_bucket, rounding, sum_bound, terms_of

import pyengine as pe
from pyengine.comm import TorchDist, torch_dist
from pyengine.wire.memory import BucketMemory

CPU = torch.device("cpu")
NUMELS = (0, 1, 3, 301)
# Ranks by host.
SHAPES = {
    1: [[[0]]],
    2: [[[0, 1]], [[0], [1]]],
    3: [[[0, 1, 2]], [[0], [1], [2]]],
    4: [[[0, 1], [2, 3]], [[0, 2], [1, 3]]],
}
PAIRS = [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "int8"), ("int8", "e4m3")]
FEEDBACK = pe.wire.ErrorFeedback(INT8)


def _wire(name: str) -> pe.wire.Wire:
    return WIRES.get(name, pe.wire.FP32())


def _pair(intra: str, inter: str, mesh: Any = None) -> pe.wire.Hierarchical:
    return pe.wire.Hierarchical(intra=_wire(intra), inter=_wire(inter), mesh=mesh)


def _added(terms: list[Tensor]) -> Tensor:
    """Bound what float32 additions of terms lose, each by 2^-24 of what is added up so far."""
    return len(terms) * 2.0**-24 * sum(term.abs() for term in terms)


def _bound(intra: str, inter: str, terms: list[Tensor], mesh: list[list[int]]) -> Tensor:
    """Bound by element how far the sum is from the exact one, as the wire's documentation derives it.

    Each rank's values are rounded once for their host, where they are added up; the sums of hosts are summed
    over hosts, with the error of that wire; and the result is rounded for the host again. A level of one rank
    does nothing. Errors grow with what is rounded, values and earlier errors together.
    """
    off, sums = torch.zeros_like(terms[0]), []
    for host in mesh:
        mine = [terms[rank] for rank in host]
        if len(host) > 1:
            lost = [rounding(intra, x, x.abs().max()) if intra != "fp32" else 0 * x for x in mine]
            mine = [x.abs() + e for x, e in zip(mine, lost, strict=True)]
            off = off + sum(lost) + _added(mine)
        sums.append(sum(x.abs() for x in mine) + off)
    if len(mesh) > 1:
        off = off + (_added(sums) if inter == "fp32" else sum_bound(inter, [x.float() for x in sums]))
    size = sum(sums) + off
    if len(mesh[0]) > 1 and intra != "fp32":
        off = off + rounding(intra, size, size.max())
    return off * (1 + 2.0**-20)  # the bound itself is computed in float32 in places


@pytest.mark.parametrize(("world", "mesh"), [(w, mesh) for w in (1, 3, 4) for mesh in SHAPES[w]], ids=str)
@on_ranks()
def test_sums_are_near_float64_and_have_the_same_bits_on_every_rank(mesh):
    rank, world = me()
    comm = TorchDist(None, CPU)
    is_first = any(host[0] == rank for host in mesh)
    for (intra, inter), numel in itertools.product(PAIRS, NUMELS):
        wire = _pair(intra, inter, mesh)
        terms = terms_of(numel, world)
        flat, before = terms[rank].clone(), comm.traffic.bytes_sent
        with rings_only():
            of_bucket(wire, numel).all_reduce_(flat, comm).wait()
        sent = comm.traffic.bytes_sent - before
        most = wire.bytes_on_wire(numel, world)
        assert sent == most or (sent < most and not is_first), (intra, inter, numel, sent, most)
        if numel:
            exact = [term.double() for term in terms]
            bound = _bound(intra, inter, exact, mesh)
            assert ((flat.double() - sum(exact)).abs() <= bound).all(), (intra, inter, numel)
        assert_alike(flat.tolist())
    comm.release()


@on_ranks(4)
def test_error_feedback_between_hosts_comes_late_rather_than_never():
    """Send the same values in all windows; in the middle parameters move to other ranks' parts."""
    rank, world = me()
    comm, numel, windows = TorchDist(None, CPU), 301, 16
    terms = terms_of(numel, world)
    wire = pe.wire.Hierarchical(inter=FEEDBACK, mesh=[[0, 1], [2, 3]])
    memory = BucketMemory(0, numel, CPU, [])
    total = torch.zeros(numel, dtype=torch.float64)
    for window in range(windows):
        turned = window >= windows // 2
        flat = terms[rank].flip(0) if turned else terms[rank].clone()
        if window == windows // 2:
            memory.residual.copy_(memory.residual.flip(0))
        wire.for_bucket(memory).all_reduce_(flat, comm).wait()
        total += flat.double().flip(0) if turned else flat.double()
    right = sum(term.double() for term in terms)
    hosts = [terms[0] + terms[1], terms[2] + terms[3]]
    # Of two windows, whose values are larger by what was kept.
    once = sum_bound("int8", hosts)
    assert ((total / windows - right).abs() <= 2.2 * once / windows + 2.0**-20 * right.abs()).all()
    comm.release()
    assert float(memory.residual.abs().max()) > 0


def _two_ranks_a_host() -> Any:
    return mock.patch.object(torch_dist, "own_host", lambda: me()[0] // 2)


def _windows(kind: str, mesh: Any, **levels: Any) -> None:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2, wire=pe.wire.Hierarchical(mesh=mesh, **levels))
    windows_of_integers(sync, forward, model)  # buckets are laid out anew between windows
    sync.close()


@pytest.mark.parametrize(("kind", "world"), [("own", 4), ("attach", 2), ("attach-view", 3)])
@on_ranks()
def test_engines_have_the_gradient_of_one_big_batch(kind):
    world = me()[1]
    for mesh in SHAPES[world]:
        _windows(kind, mesh, inter=torch.float32)
    with _two_ranks_a_host():
        if world != 3:
            _windows(kind, None)
        if world == 4:
            _windows(kind, init_device_mesh("cpu", (2, 2)))


@pytest.mark.parametrize("world", [4, *rest(2)])
@on_ranks()
def test_the_bare_hook_averages():
    rank, world = me()
    for inter in ("fp32", "int8"):
        wire = _pair("fp32", inter, SHAPES[world][0])
        ddp = DistributedDataParallel(nn.Linear(6, 2), bucket_cap_mb=1e-5)
        ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
        x = torch.arange(12.0).reshape(2, 6)
        for _ in range(3):
            ddp.zero_grad()
            (ddp(x).sum() * (1 + rank)).backward()
            want = x.sum(0).expand(2, 6) * (1 + world) / 2
            # Int8 rounds twice, by 1/254 of the largest each, of up to three times the mean.
            atol = 4 / 127 * float(want.max()) if wire.is_encoded else 0.0
            torch.testing.assert_close(ddp.module.weight.grad, want, atol=atol, rtol=2.0**-20)
            torch.testing.assert_close(ddp.module.bias.grad, torch.full((2,), 1.0 + world), atol=atol, rtol=0)


UNEQUAL = "wire=Hierarchical(): the 3 ranks are 2 + 1 by host"


@pytest.mark.parametrize(
    ("owner", "mesh", "says"),
    [
        ("own", None, UNEQUAL),
        ("ddp", None, UNEQUAL),
        ("own", [[0], [1]], "mesh=[[0], [1]]: rank 2 is in none of its rows"),
        ("fsdp", None, "which has no reduce_scatter"),
    ],
    ids=str,
)
@on_ranks(3)
def test_hosts_of_unequal_numbers_are_refused_on_every_rank(owner, mesh, says):
    wrap = {"own": lambda model: model, "ddp": DistributedDataParallel, "fsdp": fully_shard}[owner]
    make = pe.GradSync if owner == "own" else pe.attach
    with _two_ranks_a_host():
        text = error_of(make, wrap(nn.Linear(2, 2)), wire=pe.wire.Hierarchical(mesh=mesh))
    assert says in text and text.startswith("all ranks: ")


WRONG = {
    "feedback inside": ({"intra": FEEDBACK}, ValueError, "intra=ErrorFeedback"),
    "chance inside": ({"intra": pe.wire.Int8(rounding="stochastic")}, ValueError, "belong to inter"),
    "two levels": ({"inter": pe.wire.Hierarchical()}, TypeError, "need a wire of one level"),
    "no wire": ({"inter": "bf17"}, TypeError, "inter: wire='bf17': need a wire"),
    "no mesh": ({"mesh": 2}, TypeError, "mesh=2: need a DeviceMesh of two dimensions"),
    "one row": ({"mesh": [0, 1]}, TypeError, "need a DeviceMesh of two dimensions"),
    "ragged": ({"mesh": [[0, 1], [2]]}, TypeError, "rows of ranks of equal length"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    options, kind, text = WRONG[case]
    with pytest.raises(kind) as error:
        pe.wire.Hierarchical(**options)
    assert text in str(error.value)


def test_bytes_without_a_mesh_are_not_known():
    with pytest.raises(ValueError, match="depend on the number of ranks on a host"):
        pe.wire.Hierarchical().bytes_on_wire(10, 4)


def test_a_wire_prints_as_it_was_made():
    wire = pe.wire.Hierarchical(intra=torch.bfloat16, inter=pe.wire.Int8(), mesh=[[0, 1], [2, 3]])
    assert repr(wire) == "Hierarchical(intra=BF16(), inter=Int8(), mesh=((0, 1), (2, 3)))"
