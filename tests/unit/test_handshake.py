"""How the handshake distributes the micro-batches of a full window over ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.engine.handshake import WindowSplit, agree, resized
from pyengine.gradients.settings import Exact, Settings


def _comms(world: int) -> list[Any]:
    """Return the transports of ranks that are threads."""
    values: list[Any] = [None] * world
    barrier = Barrier(world, timeout=30)

    def gather(rank: int, value: object) -> list[Any]:
        values[rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def gather_objects(rank: int, values: list[Any], *numbers: int) -> tuple[list[Any], list[int]]:
        largest = [max(each) for each in zip(*gather(rank, numbers), strict=True)]
        return [gather(rank, value) for value in values], largest

    return [
        SimpleNamespace(
            rank=rank,
            world_size=world,
            ranks=range(world),
            all_gather_objects=partial(gather_objects, rank),
        )
        for rank in range(world)
    ]


def agreed(by_rank: list[int], **options: Any) -> WindowSplit:
    """Return what ranks with these numbers of micro-batches agree on."""
    with ThreadPoolExecutor(len(by_rank)) as pool:
        first, *others = pool.map(
            lambda comm, accumulate: agree(comm, [], Settings(accumulate, **options), []),
            _comms(len(by_rank)),
            by_rank,
        )
    assert all(other == first for other in others)
    return first


# The number of micro-batches of each rank, and which micro-batches of the window they are.
DEALT = [
    ([4], [range(4)]),
    ([2, 2], [range(2), range(2, 4)]),
    ([1, 2], [range(1), range(1, 3)]),  # as `WindowSampler` distributes 3
    ([1, 1, 2, 1], [range(1), range(1, 2), range(2, 4), range(4, 5)]),
]


@pytest.mark.parametrize(("by_rank", "places"), DEALT, ids=str)
def test_a_window_is_as_long_as_the_sum_over_ranks(by_rank, places):
    shares = agreed(by_rank)
    assert shares.places == places
    assert (shares.micro_batches, shares.by_rank) == (sum(by_rank), by_rank)


@pytest.mark.parametrize(
    ("micro_batches", "by_rank", "places", "most"),
    [
        (5, [2, 3], [range(2), range(2, 5)], 3),
        (5, [3, 3], [range(3), range(3, 6)], 3),
        (2, [1, 1, 1], [range(0), range(1), range(1, 2)], 1),  # more ranks than micro-batches
        (12, [2, 2], [range(2), range(2, 4)], 2),
    ],
)
def test_an_exact_window_is_as_long_as_it_was_made_for(micro_batches, by_rank, places, most):
    shares = agreed(by_rank, accumulator=Exact(micro_batches))
    assert (shares.places, shares.micro_batches, shares.most_terms) == (places, micro_batches, most)


@pytest.mark.parametrize(
    ("accumulator", "by_rank", "message"),
    [
        (Exact(2), [1, 3], r"accumulate=3: expected at least as many micro-batches"),
        (Exact(4097), [1, 1], r"means 4097 micro-batches per window over all ranks, .* supports 1 to 4096"),
        ("exact", [2049, 2048], r"accumulate=\[2049, 2048\] by rank means 4097 micro-batches"),
        (Exact(8194, slots=4097), [8194], r"means 4097 slots per window over .* supports 1 to 4096"),
        (Exact(8, slots=4), [4, 2, 2], r"slots=4\) on 3 ranks .* slots can be divided among 1, 2, 4 ranks"),
        (Exact(8, slots=4), [5, 3], r"accumulate=\[5, 3\] by rank: .* 2 whole slots of 2 .* accumulate=4"),
    ],
)
def test_a_window_that_exact_sums_cannot_hold_is_refused(accumulator, by_rank, message):
    with pytest.raises(ValueError, match=message):
        agreed(by_rank, accumulator=accumulator)


def test_a_window_cut_in_slots_takes_a_term_a_slot():
    shares = agreed([6144, 6144], accumulator=Exact(12288, slots=4096))
    assert (shares.slot_size, shares.terms, shares.micro_batches) == (3, 4096, 12288)


def test_a_window_of_another_size_is_dealt_out_anew_and_an_exact_one_keeps_its_size():
    shares = resized(agreed([1, 3]), 3, is_exact=False)
    assert (shares.places, shares.micro_batches, shares.by_rank) == ([range(3), range(3, 6)], 6, [3, 3])
    exact = agreed([2, 2], accumulator="exact")
    assert resized(exact, 2, is_exact=True) is exact
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3: .* was made for 4 micro-batches"):
        resized(exact, 3, is_exact=True)


def test_ranks_with_other_versions_of_the_package_are_named():
    def gather(values: list[Any], *numbers: int) -> tuple[list[Any], list[int]]:
        words, place = values
        by_rank = [(version, *words[1:]) for version in ("0.1.0", "0.2.0", "0.2.0")]
        return [by_rank, [place] * 3], [*numbers]

    comm = SimpleNamespace(rank=0, world_size=3, ranks=range(3), all_gather_objects=gather)
    with pytest.raises(ValueError, match="same version of pyengine.*rank 0 has 0.1.0; rank 1 has 0.2.0"):
        agree(comm, [], Settings(1), [])
