"""`WindowSampler` gives the same windows of the same micro-batches for every world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch.utils.data import DataLoader

from pyengine import WindowSampler

SIZE = 3  # samples per micro-batch
WORLDS = [1, 2, 3, 8]
# Whole windows; a short micro-batch; a window with one sample; less than a window; one sample.
SAMPLES = [144, 148, 145, 20, 1]


def build(samples: int, micro_batches: int = 8, **options) -> WindowSampler:
    return WindowSampler(samples, seed=42, micro_batch=SIZE, global_batch=SIZE * micro_batches, **options)


def by_window(sampler: WindowSampler) -> list[list[list[int]]]:
    """Split a rank's micro-batches into windows, as `sync.windows` does."""
    found, size = list(sampler), sampler.accumulate
    return [found[i : i + size] for i in range(0, len(found), size)]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_together_see_the_windows_of_a_single_rank(world, micro_batches, samples):
    alone = build(samples, micro_batches)
    whole = by_window(alone)
    together: list[list[list[int]]] = [[] for _ in whole]
    for rank in range(world):
        sampler = alone.shard(rank=rank, world_size=world)
        assert len(sampler) == len(list(sampler)) == len(DataLoader(range(samples), batch_sampler=sampler))
        assert sampler.accumulate >= 1  # also of a rank without a share
        for number, mine in enumerate(by_window(sampler)):
            assert mine == whole[number][sampler.first : sampler.first + sampler.accumulate]
            together[number] += mine
    assert (alone.rank, alone.world_size, alone.num_windows) == (0, 1, len(whole))
    assert all(len(window) == micro_batches for window in whole[:-1])
    assert together == whole


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_holds_every_sample_once_in_micro_batches_of_full_size(samples, drop_last):
    kept = samples - samples % (8 * SIZE) if drop_last else samples
    if kept == 0:
        with pytest.raises(ValueError, match=f"dataset_size={samples} gives no window .* at least 24"):
            build(samples, drop_last=drop_last)
        return
    batches = list(build(samples, drop_last=drop_last))
    assert {len(batch) for batch in batches[:-1]} <= {SIZE} and len(batches[-1]) == (kept - 1) % SIZE + 1
    drawn = [index for batch in batches for index in batch]
    assert len(set(drawn)) == len(drawn) == kept


def test_the_order_depends_on_seed_and_epoch_alone():
    sampler = build(50)
    first = list(sampler)
    torch.manual_seed(1)
    assert list(sampler) == list(build(50)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(WindowSampler(50, seed=43, micro_batch=SIZE, global_batch=24)) != first
    assert [i for batch in build(50, shuffle=False) for i in batch] == list(range(50))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("window", [0, 2, 6])
def test_an_epoch_goes_on_at_any_window_in_any_world(world, window):
    for rank in range(world):
        sampler = build(148).shard(rank=rank, world_size=world)
        rest = by_window(sampler)[window:]
        sampler.set_epoch(0, window=window)
        assert by_window(sampler) == rest and len(sampler) == len(list(sampler))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_same_batches(workers):
    sampler = build(50).shard(rank=1, world_size=3)
    loader = DataLoader(range(50), batch_sampler=sampler, num_workers=workers)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == list(sampler)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"global_batch": 1000}, ValueError, "global_batch=1000 .* micro_batch=16; nearest: 992 and 1008"),
        ({"micro_batch": 0}, ValueError, "micro_batch=0: expected at least 1"),
        ({"micro_batch": 2.0}, TypeError, "micro_batch=2.0 is a float"),
        ({"seed": None}, TypeError, "seed=None is a NoneType"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"dataset": 0}, ValueError, "dataset_size=0 gives no window .* expected at least 1 samples"),
        ({"dataset": iter([1])}, TypeError, "dataset is a list_iterator without a length"),
        ({"dataset": torch.tensor(4)}, TypeError, "dataset is a Tensor without a length"),
        ({"dataset": True}, TypeError, "dataset=True is a bool"),
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank=2: expected 0 to 1, since num_replicas=2"),
        ({"rank": 1}, ValueError, "rank=1: expected 0 to 0, since num_replicas=1; .* here 0 and 1"),
        ({"num_replicas": 0}, ValueError, "num_replicas=0: expected a whole number of at"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas=2.0 is a float"),
    ],
)
def test_a_bad_argument_is_named(changes, error, message):
    options = {"dataset": 2000, "seed": 1, "micro_batch": 16, "global_batch": 64} | changes
    with pytest.raises(error, match=f"^{message}"):
        WindowSampler(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda sampler: sampler.set_epoch(5, window=3),
            r"window=3: an epoch has 3 windows.*divmod\(3, 3\)",
        ),
        (
            lambda sampler: sampler.set_epoch(5, window=4),
            r"window=4: an epoch has 3 windows.*divmod\(4, 3\)",
        ),
        (lambda sampler: sampler.shard(rank=2, world_size=2), "rank=2"),
        (lambda sampler: sampler.shard(rank=-1, world_size=2), "rank=-1"),
    ],
)
def test_what_the_sampler_does_not_have_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(build(50))


def test_a_place_may_be_given_by_the_names_of_distributed_sampler():
    for rank in range(3):
        named, shard = build(148, num_replicas=3, rank=rank), build(148).shard(rank=rank, world_size=3)
        assert (list(named), named.accumulate) == (list(shard), shard.accumulate)


class _Sized:
    """A map-style dataset of which only the length is used."""

    def __len__(self) -> int:
        return 50


@pytest.mark.parametrize(
    "dataset",
    [range(50), torch.zeros(50, 2), _Sized(), np.int64(50)],
    ids=lambda d: type(d).__name__,
)
def test_a_dataset_may_stand_for_its_length(dataset):
    options = {"seed": 42, "micro_batch": SIZE, "global_batch": 24}
    assert list(WindowSampler(dataset, **options)) == list(build(50))
    assert list(WindowSampler(dataset=dataset, **options)) == list(build(50))


@on_ranks(2)
def test_rank_and_world_size_default_to_the_default_group():
    sampler = build(20)
    assert (sampler.rank, sampler.world_size) == (torch.distributed.get_rank(), 2)
    assert sum(map(len, build(20, rank=0, num_replicas=1))) == 20  # all samples, whatever the group
