"""How ranks merge exact sums: bits, bytes, and transports that cannot exchange parts."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from cases import Integers, engine, me, rings_only, windows_of_integers
from marks import rest
from ranks import on_ranks
from torch import Tensor

from pyengine.comm import comm_for
from pyengine.comm.base import Comm, Work
from pyengine.engine import handshake
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

CPU = torch.device("cpu")
# Fewer blocks than ranks, as many blocks as ranks, and numbers that are no multiple of the world size.
LAYOUTS = ([1], [64, 64], [200, 0, 3], [64] * 7, [1000, 1, 130, 4096])
TERMS = 8


class _ReducesOnly(Comm):
    """A transport without all-to-all and all-gather."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(rank=comm.rank, world_size=comm.world_size)
        self.join(comm)
        self._comm = comm

    def all_gather_object(self, value: object) -> list[object]:
        return self._comm.all_gather_object(value)

    def broadcast_(self, tensors: list[Tensor]) -> None:
        self._comm.broadcast_(tensors)

    def all_reduce(self, flat: Tensor) -> Work:
        return self._comm.all_reduce(flat)

    def all_reduce_max(self, flat: Tensor) -> Work:
        return self._comm.all_reduce_max(flat)


def _plan(numels: list[int]) -> tuple[BucketPlan, int]:
    *offsets, end = itertools.accumulate([-(-n // 64) * 64 for n in numels], initial=0)
    return BucketPlan(offsets, numels), end


def _terms(numels: list[int], rank: int) -> list[list[Tensor | None]]:
    """Return two terms of a rank, of all magnitudes; some are not finite, some are zero, one is missing."""
    terms: list[list[Tensor | None]] = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * rank + number)
        exponents = [torch.randint(-30, 30, (n,), generator=generator) for n in numels]
        terms.append([torch.randn(e.numel(), generator=generator) * 2.0**e for e in exponents])
    whole = terms[0][0]
    assert whole is not None
    if rank == 1:
        terms[1][-1] = None
        whole[-1] = math.nan if numels[0] > 1 else 2.0**90
        if len(numels) == 7:
            terms[0][5], terms[1][5] = torch.full((64,), math.inf), torch.zeros(64)
    if len(numels) > 1:
        terms[0][1], terms[1][1] = torch.zeros(numels[1]), torch.full((numels[1],), 1e-40)
    return terms


def _deposit(total: ExactSum, terms: list[list[Tensor | None]], slots: int) -> None:
    for number, term in enumerate(terms or [[None] * slots]):
        total.deposit_(term, first=number == 0, nonfinite=torch.zeros(slots, dtype=torch.uint8))


def _merged(
    comm: Comm, numels: list[int], nums: list[int], *, most: int = 2, poison: bool = False
) -> tuple[Tensor, int]:
    """Return the rounded sum over ranks, of `nums` terms by rank, and the bytes that this rank sent."""
    plan, numel = _plan(numels)
    total = exact_over_ranks(plan, terms=Terms(TERMS, most), device=CPU, comm=comm)
    result, num_bytes = torch.empty(0), 0
    for window in range(3):  # a window must not affect the next one
        total.begin()
        if window == 1:  # not even one in which all ranks had two terms
            _deposit(total, _terms(numels, comm.rank), len(numels))
        else:
            _deposit(total, _terms(numels, comm.rank)[: nums[comm.rank]], len(numels))
        before = comm.traffic.bytes_sent
        with rings_only():
            total.rounds(poison=poison).wait()
        result, num_bytes = total.rounded[:numel].clone(), comm.traffic.bytes_sent - before
    return result, num_bytes


def _bits(values: Tensor) -> list[int]:
    return torch.where(values.isnan(), math.nan, values).view(torch.int32).tolist()


def _right(numels: list[int], nums: list[int]) -> list[int]:
    """Return the bits of the sum of `nums` terms of the ranks, computed on one rank."""
    plan, numel = _plan(numels)
    alone, right = ExactSum(plan, numel=numel, terms=TERMS, device=CPU), torch.empty(numel)
    terms = [term for rank, num in enumerate(nums) for term in _terms(numels, rank)[:num]]
    _deposit(alone, terms, len(numels))
    alone.round_(right)
    return _bits(right)


@on_ranks(2)
def test_what_adds_up_terms_counts_among_the_bytes_held():
    plan, _ = _plan([1024])
    comm = comm_for(CPU, None)
    totals = [exact_over_ranks(plan, terms=Terms(TERMS, most), device=CPU, comm=comm) for most in (2, 1)]
    plain, terms = (sum(tensor.nbytes for tensor in total.round_tensors()) for total in totals)
    assert terms - plain == 512 * 8 + 512 // 64 + 1  # integers and bins of a part, and a flag


@pytest.mark.parametrize(
    ("world", "numels"),
    [*((3, numels) for numels in LAYOUTS), (1, LAYOUTS[-1]), *rest(*itertools.product((2, 4), LAYOUTS))],
    ids=str,
)
@on_ranks()
def test_ranks_merge_to_the_bits_of_one_sum_and_send_parts_of_it(numels):
    """One term per rank is sent as it is, several terms are sent as integers."""
    _, world = me()
    comm = comm_for(CPU, None)
    part = -(-_plan(numels)[1] // (64 * world)) * 64  # in whole blocks
    bins = part * world // 64
    for most in (1, 2):
        nums = [most] * world
        found, num_bytes = _merged(comm, numels, nums, most=most)
        assert _bits(found) == _right(numels, nums)
        assert _merged(comm, numels, nums, most=most, poison=True)[0].isnan().all()
        if world > 1:  # to each other rank: two limbs or a float32, then a float32; bins, or a flag
            limbs, flags = (8, bins) if most == 2 else (4, 1)
            assert num_bytes == (world - 1) * part * (limbs + 4) + 2 * (world - 1) * flags // world
    assert _bits(_merged(_ReducesOnly(comm), numels, [2] * world)[0]) == _right(numels, [2] * world)
    for uneven in ([2] + [1] * (world - 1), [1] * (world - 1) + [0], [0, 2, 1, 0][:world]):
        assert _bits(_merged(comm, numels, uneven, most=1)[0]) == _right(numels, uneven)


def _windows_over(hosts: str, kind: str) -> list[int]:
    """Return the bytes of each window, with all ranks on one host, or each rank on its own host."""
    rank, _ = me()
    records = []
    with mock.patch.object(handshake, "own_host", lambda: 0 if hosts == "one" else rank):
        model = Integers(torch.float32)
        options = {"accumulator": "exact"} if kind == "attach" else {}
        sync, forward = engine(kind, model, accumulate=2, **options)
    sync.on_step(records.append)
    windows_of_integers(sync, forward, model)
    sync.close()
    return [record.bytes_on_wire for record in records]


@pytest.mark.parametrize(("kind", "world"), [("own-exact", 3), ("attach", 2)])
def test_parts_are_exchanged_between_hosts_and_not_within_one(ranks, world, kind):
    inside, between = (ranks(world).run(_windows_over, hosts, kind)[0] for hosts in ("one", "many"))
    assert all(b < a for a, b in zip(inside, between, strict=True))
