"""Memory that ranks share, and reductions in it.

The ranks in these tests are threads, each with its own arena over one file;
`tests/distributed/test_shared_memory.py` uses processes.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from pyengine.comm.arena import Arena, MemoryOffer, SharedWork
from pyengine.comm.process_state import ProcessId
from pyengine.ops import native

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or native.core() is None, reason="needs Linux and the native core"
)

ALIVE = timedelta(seconds=30)


@contextmanager
def _arenas(world: int) -> Iterator[list[Arena]]:
    offer = MemoryOffer.make(world)
    processes = [offer.process] * world
    made = [
        Arena(offer.open(), processes=processes, place=place, ranks=range(world)) for place in range(world)
    ]
    offer.withdraw()
    try:
        yield made
    finally:
        for arena in made:
            arena.close()


def _reduce(arena: Arena, flat: Tensor, *, is_max: bool = False, timeout_s: float = 30.0) -> SharedWork:
    return arena.reduce(flat, is_max=is_max, timeout_s=timeout_s)


def _reduce_all(arenas: list[Arena], flats: list[Tensor], *, is_max: bool = False) -> None:
    """Launch a collective on every rank, then wait for all."""
    works = [_reduce(arena, flat, is_max=is_max) for arena, flat in zip(arenas, flats, strict=True)]
    for work in works:
        work.wait(ALIVE)


def _placed(arenas: list[Arena], parts: list[Tensor], where: str) -> list[Tensor]:
    """Copy each rank's part to memory of the kind `where`.

    "shared" is memory of the arena, "odd" is memory of the arena that does not begin at a cache line, "own"
    is torch's memory, and "one is not" is torch's memory on rank 0 and memory of the arena on other ranks.
    """
    placed = []
    for rank, (arena, part) in enumerate(zip(arenas, parts, strict=True)):
        if where == "own" or (where == "one is not" and rank == 0):
            placed.append(part.clone())
        else:
            shift = 3 if where == "odd" else 0
            placed.append(arena.allocate(part.numel() + shift, part.dtype)[shift:].copy_(part))
    return placed


PLACES = ["shared", "own", "odd", "one is not"]


def _in_rank_order(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum in rank order, rounded by each addition in the sum's dtype, and once at the end."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request):
    """Run on one instruction set, if this machine has it."""
    if not native._core.set_isa(request.param):
        pytest.skip("this machine lacks it")
    yield request.param
    native._core.set_isa(os.environ.get("PYENGINE_ISA", "auto"))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ranks_are_summed_in_their_order_in_any_memory(isa, world, dtype):
    with _arenas(world) as arenas:
        for numel in (1, 129, 400_003):
            parts = [
                torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)
            ]
            want = _in_rank_order(parts, dtype)
            exact = torch.stack([part.double() for part in parts]).sum(0)
            size = torch.stack([part.double().abs() for part in parts]).sum(0)
            # One rounding to the dtype, and W - 1 roundings of the sum.
            unit = torch.finfo(dtype).eps / 2 + (world - 1) * torch.finfo(torch.float32).eps / 2
            assert ((want.double() - exact).abs() <= unit * size * 1.01).all()
            for where in PLACES:
                buffers = _placed(arenas, parts, where)
                _reduce_all(arenas, buffers)
                assert all(torch.equal(buffer, want) for buffer in buffers)


@pytest.mark.parametrize("where", PLACES)
def test_integers_wrap_and_marks_take_the_largest(where):
    world = 3
    with _arenas(world) as arenas:
        generator = torch.Generator().manual_seed(1)
        for numel in (1, 8193, 300_001):
            ints = [torch.randint(-(2**31), 2**31, (numel,), generator=generator).int() for _ in range(world)]
            marks = [torch.randint(0, 256, (numel,), generator=generator).byte() for _ in range(world)]
            total = torch.stack(ints).sum(0, dtype=torch.int64).int()
            for parts, want, is_max in ((ints, total, False), (marks, torch.stack(marks).amax(0), True)):
                buffers = _placed(arenas, parts, where)
                _reduce_all(arenas, buffers, is_max=is_max)
                assert all(torch.equal(buffer, want) for buffer in buffers)


def test_nan_has_the_same_bits_on_every_rank():
    with _arenas(2) as arenas:
        buffers = [arena.allocate(2, torch.float32) for arena in arenas]
        for buffer, bits in zip(buffers, (0x7FC00001, 0x7FC00002), strict=True):
            buffer.view(torch.int32).fill_(bits)
        _reduce_all(arenas, buffers)
        assert torch.equal(buffers[0].view(torch.int32), buffers[1].view(torch.int32))
        assert buffers[0].isnan().all()


def test_collectives_run_in_their_order_and_their_futures_complete():
    with _arenas(2) as arenas:
        queues = [[arena.allocate(10, torch.float32).fill_(n) for n in range(20)] for arena in arenas]
        works = [[_reduce(a, flat) for flat in q] for a, q in zip(arenas, queues, strict=True)]
        futures = [work.get_future() for work in works[0]]
        for number, future in enumerate(futures):
            assert torch.equal(future.wait()[0], torch.full((10,), 2.0 * number))
        works[1][-1].wait()
        assert all(work.is_completed() for work in [*works[0], *works[1]])
        assert works[1][3].get_future().done()  # requested after it has ended


def test_a_wait_that_times_out_raises_and_can_be_repeated():
    with _arenas(2) as arenas:
        flats = [torch.ones(3) for _ in arenas]
        work = _reduce(arenas[0], flats[0])
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="timed out waiting"):
            work.wait(timedelta(seconds=0.01))
        _reduce(arenas[1], flats[1]).wait(ALIVE)
        work.wait(ALIVE)
        assert torch.equal(flats[0], torch.full((3,), 2.0))


def test_ranks_in_different_collectives_all_raise():
    with _arenas(3) as arenas:
        works = [_reduce(arena, torch.ones(3 + (rank == 1))) for rank, arena in enumerate(arenas)]
        for work in works:
            with pytest.raises(RuntimeError, match="different collectives|has given up a collective"):
                work.wait(ALIVE)
        with pytest.raises(RuntimeError, match="different collectives|has given"):  # also later
            _reduce(arenas[0], torch.ones(2)).wait(ALIVE)


def test_a_rank_that_does_not_come_in_time_is_an_error_on_all():
    with _arenas(3) as arenas:
        works = [_reduce(arena, torch.ones(3), timeout_s=0.1) for arena in arenas[:2]]
        errors = []
        for work in works:
            with pytest.raises(RuntimeError) as error:
                work.wait(ALIVE)
            errors.append(str(error.value))
        assert any("rank 2 did not launch this collective within 0.1 s" in text for text in errors)


@pytest.mark.parametrize(
    ("closes", "message"),
    [(1, "closed or dropped its engine"), (0, "this rank has left")],
    ids=["another", "this one"],
)
def test_when_an_arena_closes_every_wait_raises(closes, message):
    with _arenas(2) as arenas:
        works = [_reduce(arenas[0], torch.ones(3)) for _ in range(2)]
        futures = [work.get_future() for work in works]
        threading.Timer(0.05, arenas[closes].close).start()
        for work, future in zip(works, futures, strict=True):
            with pytest.raises(RuntimeError, match=message):
                work.wait(ALIVE)
            with pytest.raises(RuntimeError, match=message):
                future.wait()
        with pytest.raises(RuntimeError, match="this rank has left"):
            _reduce(arenas[closes], torch.ones(3))


def test_one_look_at_a_dead_rank_fails_nothing_and_two_in_a_row_do(monkeypatch):
    state, look = "dead", Arena.look
    monkeypatch.setattr(Arena, "look", lambda *_: None)  # called by the arena's own thread
    monkeypatch.setattr(ProcessId, "state", lambda *_: state)
    with _arenas(2) as arenas:
        work = _reduce(arenas[0], torch.ones(3))
        for state in ("dead", "running", "dead"):  # noqa: B007 - ProcessId.state returns it
            while not arenas[0]._core.missing():
                pass
            look(arenas[0], 0.0)
        with pytest.raises(RuntimeError, match="timed out waiting"):
            work.wait(timedelta(seconds=0.01))
        look(arenas[0], 0.0)
        with pytest.raises(RuntimeError, match="rank 1, process .*, has died"):
            work.wait(ALIVE)


def test_memory_of_a_tensor_that_goes_is_free_at_once():
    offer = MemoryOffer.make(1)
    arena = Arena(offer.open(), processes=[offer.process], place=0, ranks=[0])
    blocks = os.fstat(offer.descriptor).st_blocks
    flat = arena.allocate(2**18, torch.float32)
    assert os.fstat(offer.descriptor).st_blocks >= blocks + 2**20 // 512
    del flat
    assert os.fstat(offer.descriptor).st_blocks == blocks
    arena.close()
    offer.withdraw()


def test_a_file_of_another_process_is_not_taken_for_the_one_that_was_offered():
    offer = MemoryOffer.make(2)
    os.pwrite(offer.descriptor, b"another's token!", 0)
    with pytest.raises(OSError, match="is not process"):
        offer.open()
    offer.withdraw()


@pytest.mark.parametrize("attempt", range(3))
def test_a_collectives_own_memory_is_no_block_that_is_allocated_at_the_same_time(attempt):
    """Allocating a large block takes milliseconds; meanwhile, the arena's thread allocates copy buffers."""
    with _arenas(2) as arenas:
        made: list[Tensor] = []
        allocates = threading.Thread(target=lambda: made.append(arenas[0].allocate(2**24, torch.float32)))
        works = [_reduce(arenas[0], torch.ones(1000))]
        allocates.start()
        works.append(_reduce(arenas[1], torch.ones(1000)))
        for work in works:
            work.wait(ALIVE)
        allocates.join()
        assert not made[0].any()


def _in_fork(body: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Return whether `body` returns True in a fork of this process, which meanwhile runs `meanwhile`."""
    child = os.fork()
    if not child:
        is_right = False
        try:
            is_right = body()
        finally:
            os._exit(not is_right)
    meanwhile()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_that_a_fork_frees_stays_allocated_in_the_parent():
    with _arenas(2) as arenas:
        flats = [arena.allocate(5000, torch.float32).fill_(3.0) for arena in arenas]

        def child() -> bool:
            flats.clear()
            arenas.clear()
            gc.collect()
            return True

        assert _in_fork(child)
        _reduce_all(arenas, flats)
        assert torch.equal(flats[1], torch.full((5000,), 6.0))


def test_a_fork_keeps_what_was_there_and_its_own_fork_too():
    with _arenas(1) as (arena,):
        flat = arena.allocate(5000, torch.float32).fill_(3.0)
        is_changed, changed = os.pipe()

        def child() -> bool:
            os.read(is_changed, 1)
            is_kept = bool((flat == 3.0).all())
            flat.fill_(5.0)
            return is_kept and _in_fork(lambda: bool((flat == 5.0).all()))

        def parent() -> None:
            flat.fill_(7.0)
            os.write(changed, b"!")

        assert _in_fork(child, parent)
        assert (flat == 7.0).all()


def test_a_fork_allocates_memory_of_its_own():
    with _arenas(1) as (arena,):
        is_made, made = os.pipe()
        flats: list[Tensor] = []

        def child() -> bool:
            mine = arena.allocate(5000, torch.float32)
            os.read(is_made, 1)
            mine.fill_(7.0)
            return True

        def parent() -> None:
            flats.append(arena.allocate(5000, torch.float32))
            os.write(made, b"!")

        assert _in_fork(child, parent)
        assert not flats[0].any()
