"""Wires whose sums take two exchanges: bits, bytes, and errors against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import me
from marks import rest
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from wire_cases import BF16, ENCODED, FEEDBACK, STOCHASTIC, WIRES, of_bucket, sum_bound, terms_of

import pyengine as pe
from pyengine.comm import Local, TorchDist, comm_for

NUMELS = (0, 1, 32, 33, 1000)


def _comm() -> TorchDist:
    comm = comm_for(torch.device("cpu"), None)
    assert isinstance(comm, TorchDist)
    return comm


def _sums() -> list[tuple[str, int, Tensor]]:
    rank, world = me()
    comm, found = _comm(), []
    for name, wire in WIRES.items():
        for numel in NUMELS:
            terms = [term.to(wire.dtype).float() for term in terms_of(numel, world)]
            flat = terms[rank].to(wire.dtype, copy=True)
            before = comm.traffic.bytes_sent
            work = of_bucket(wire, numel).all_reduce_(flat, comm)
            work.wait()
            assert comm.traffic.bytes_sent - before == wire.bytes_on_wire(numel, world)
            right = sum(term.double() for term in terms)
            if world == 1:
                assert torch.equal(flat.double(), right)
            elif numel:
                assert ((flat.double() - right).abs() <= sum_bound(name, terms)).all(), (name, numel)
            found.append((name, numel, flat))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, *rest(4)])
def test_every_wire_sums_within_its_bound_sends_what_it_says_and_gives_all_ranks_the_same_bits(ranks, world):
    first, *others = ranks(world).run(_sums)
    for other in others:
        for (name, numel, mine), (_, _, theirs) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs), (name, numel)


class _Made(TorchDispatchMode):
    """Records the bytes of every new tensor that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.sizes.append(made.nbytes)
        return made


@on_ranks(3)
def test_from_the_second_window_on_a_sum_takes_no_memory_and_has_the_bits_of_the_first():
    rank, world = me()
    comm = _comm()
    for wire in (*WIRES.values(), *FEEDBACK.values(), STOCHASTIC):
        for numel in (64 * world, 999):
            bound = of_bucket(wire, numel)
            terms = [term.to(wire.dtype) for term in terms_of(numel, world)]
            for window in range(2):
                flat, once = terms[rank].clone(), terms[rank].clone()
                of_bucket(wire, numel).all_reduce_(once, comm).wait()
                with _Made() as made:
                    bound.all_reduce_(flat, comm).wait()
                largest = max(made.sizes, default=0)
                assert (largest >= numel) == (window == 0), (wire, numel, window, largest)
                if wire not in FEEDBACK.values() and wire != STOCHASTIC:
                    assert torch.equal(flat, once), (wire, numel, window)


@on_ranks(2)
def test_sums_of_one_bucket_that_are_under_way_at_once_have_memory_of_their_own():
    """One of the sums is never waited for."""
    comm, numel = _comm(), 999
    world = comm.world_size
    for wire in WIRES.values():
        bound = of_bucket(wire, numel)
        flats = [torch.full((numel,), 2.0**power, dtype=wire.dtype) for power in range(4)]
        bound.all_reduce_(flats[0], comm).wait()
        works = [bound.all_reduce_(flat, comm) for flat in flats[1:]]  # the first one is never waited for
        for power, work in ((2, works[1]), (3, works[2])):
            work.wait()
            wanted = torch.full((numel,), world * 2.0**power)
            assert ((flats[power].float() - wanted).abs() <= 0.07 * wanted).all(), (wire, power)


def test_a_wire_of_one_byte_sends_a_quarter_and_its_scales():
    wide, narrow = [pe.wire.FP32()], [pe.wire.BF16(), pe.wire.FP16(), BF16]
    encoded = [pe.wire.Int8(), pe.wire.FP8(), pe.wire.ErrorFeedback(pe.wire.Int8())]
    # 2 (W - 1) / W elements of 4, 2 and 1 bytes; 256 elements of 1 byte share a scale of 4 bytes.
    want = [6 * 2**20, *[3 * 2**20] * 3, *[2**20 * 3 // 2 * 260 // 256] * 3]
    assert [wire.bytes_on_wire(2**20, 4) for wire in (*wide, *narrow, *encoded)] == want


@on_ranks(4)
def test_what_is_not_finite_crosses_every_wire_at_its_own_element():
    rank, world = me()
    comm = _comm()
    for wire in (*WIRES.values(), *FEEDBACK.values(), STOCHASTIC):
        flat = torch.ones(300, dtype=wire.dtype)
        if rank == world - 1:
            flat[7], flat[200], flat[299] = torch.inf, -torch.inf, torch.nan
        bound = of_bucket(wire, 300)
        bound.all_reduce_(flat, comm).wait()
        wrong = torch.nonzero(~flat.isfinite()).flatten().tolist()
        assert wrong == [7, 200, 299], wire
        if wire in FEEDBACK.values():
            assert bound.memory.residual.isfinite().all()


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_error_feedback_loses_nothing():
    """The sums that have arrived, plus the residuals of all ranks, are the sums of what was sent."""
    rank, world = me()
    comm, numel = _comm(), 1000
    for name, wire in FEEDBACK.items():
        bound = of_bucket(wire, numel)
        arrived, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for number in range(5):
            terms = [term * (number + 1) for term in terms_of(numel, world)]
            flat = terms[rank].clone()
            bound.all_reduce_(flat, comm).wait()
            arrived += flat.double()
            sent += sum(term.double() for term in terms)
        kept = sum(r.double() for r in comm.all_gather_object(bound.memory.residual))
        # Every residual is a difference of float32 numbers, rounded once or twice per window, as are sums.
        size = 5 * 5 * sum(term.abs().max() for term in terms) * 4 * world * 2.0**-24
        assert ((arrived + kept - sent).abs() <= size).all(), name


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_a_wire_leaves_every_rank_its_part():
    rank, world = me()
    comm, size = _comm(), 77
    for name, wire in WIRES.items():
        terms = [term.to(wire.dtype).float() for term in terms_of(size * world, world)]
        before, out = comm.traffic.bytes_sent, torch.empty(size)
        of_bucket(wire, size * world).reduce_scatter(out, terms[rank].to(wire.dtype), comm)
        right = sum(term.double() for term in terms)[rank * size :][:size]
        assert ((out.double() - right).abs() <= sum_bound(name, terms)[rank * size :][:size]).all(), name
        if name in ENCODED:
            codec = wire.encoding.codec
            assert comm.traffic.bytes_sent - before == (world - 1) * codec.num_bytes(size)
    alone = torch.empty(5)
    pe.wire.Int8().reduce_scatter(alone, torch.arange(5.0), Local())
    assert torch.equal(alone, torch.arange(5.0))


def _by_chance() -> list[list[int]]:
    """Check that the mean of many sums is close to the true sum; return this rank's seeds of some sums."""
    _, world = me()
    comm, numel, turns = _comm(), 64, 100
    bound = of_bucket(STOCHASTIC, numel)
    values = torch.linspace(-1.0, 1.0, numel)
    total, seeds = torch.zeros(numel, dtype=torch.float64), []
    for turn in range(turns):
        if turn < 3:
            seeds.append([bound._seed(comm.rank, stage) for stage in range(2)])
        flat = values.clone()
        bound.all_reduce_(flat, comm).wait()
        total += flat.double()
    # A sum has `world` errors of at most 1/127 and one of at most world/127, which are independent and 0 on
    # average. By Hoeffding's inequality, 64 means of 100 sums are all within 6 * size / 10 of the true sums,
    # except with a probability of about 1e-6.
    step = 1 / 127 * (1 + 2.0**-14)
    size = (world * step**2 + (world * step) ** 2) ** 0.5
    assert ((total / turns - world * values.double()).abs() <= 6 * size / turns**0.5).all()
    return seeds


def test_stochastic_rounding_is_right_on_average_with_chances_of_its_own_every_time(ranks):
    found = ranks(2).run(_by_chance)
    flat = [seed for rank in found for turn in rank for seed in turn]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("wire", [STOCHASTIC, FEEDBACK["int8"]], ids=str)
def test_a_wire_that_keeps_something_says_what_it_lacks(wire):
    with pytest.raises(RuntimeError, match="use the wire that this wire"):
        wire.all_reduce_(torch.ones(3), Local())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pe.wire.BF16(sum="fp16"), "sum='fp16': expected 'wire'"),
        (lambda: pe.wire.Int8(block=100), "block=100"),
        (lambda: pe.wire.Int8(rounding="up"), "rounding='up': expected 'nearest' or 'stochastic'"),
        (lambda: pe.wire.Int8(seed=-1), "seed=-1: expected an int from 0"),
        (lambda: pe.wire.FP8("e3m4"), "format='e3m4': expected 'e4m3' or 'e5m2'"),
        (lambda: pe.wire.ErrorFeedback(pe.wire.FP16()), r"use FP16\(sum='fp32'\)"),
        (
            lambda: pe.wire.ErrorFeedback(pe.wire.FP32()),
            r"wire=FP32\(\): expected a wire whose rounding error",
        ),
        (lambda: pe.wire.ErrorFeedback(pe.wire.Int8), "expected a wire whose rounding error"),
    ],
)
def test_an_argument_that_makes_no_wire_is_named(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
