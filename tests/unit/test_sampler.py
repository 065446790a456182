"""The same windows of the same micro-batches for every world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch.utils.data import DataLoader

from pyengine import WindowSampler

SIZE = 3  # of a micro-batch
WORLDS = [1, 2, 3, 8]
# samples / 3: whole windows; a short micro-batch; a window with one sample; less than a window; one sample
SAMPLES = [144, 148, 145, 20, 1]


def build(samples: int, micro_batches: int = 8, **options) -> WindowSampler:
    return WindowSampler(samples, seed=42, micro_batch=SIZE, global_batch=SIZE * micro_batches, **options)


def by_window(sampler: WindowSampler) -> list[list[list[int]]]:
    """Cut a rank's micro-batches as `sync.windows` does."""
    found, size = list(sampler), sampler.accumulate
    return [found[i : i + size] for i in range(0, len(found), size)]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("micro_batches", [8, 12])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_together_see_the_windows_of_a_single_rank(world, micro_batches, samples):
    alone = build(samples, micro_batches)
    ranks = [by_window(alone.shard(rank=rank, world_size=world)) for rank in range(world)]
    together = [
        [batch for rank in ranks for batch in (rank[number] if number < len(rank) else [])]
        for number in range(alone.num_windows)
    ]
    assert together == by_window(alone)


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_holds_every_sample_once_in_micro_batches_of_full_size(samples, drop_last):
    kept = samples - samples % (8 * SIZE) if drop_last else samples
    if kept == 0:
        with pytest.raises(ValueError, match=f"dataset_size={samples} gives no window .* need 24"):
            build(samples, drop_last=drop_last)
        return
    batches = list(build(samples, drop_last=drop_last))
    assert {len(batch) for batch in batches[:-1]} <= {SIZE} and len(batches[-1]) == (kept - 1) % SIZE + 1
    drawn = [index for batch in batches for index in batch]
    assert len(set(drawn)) == len(drawn) == kept


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("world", WORLDS)
def test_lengths_are_right_and_only_the_last_window_is_short(world, micro_batches, samples):
    for rank in range(world):
        sampler = build(samples, micro_batches).shard(rank=rank, world_size=world)
        assert len(sampler) == len(list(sampler)) == len(DataLoader(range(samples), batch_sampler=sampler))
        windows = by_window(sampler)
        assert all(len(window) == sampler.accumulate for window in windows[: sampler.num_windows - 1])


@pytest.mark.parametrize("world", WORLDS)
def test_first_is_the_index_of_a_ranks_first_micro_batch_in_its_window(world):
    alone = by_window(build(144))
    for rank in range(world):
        sampler = build(144).shard(rank=rank, world_size=world)
        for mine, everybodys in zip(by_window(sampler), alone, strict=True):
            assert mine == everybodys[sampler.first : sampler.first + sampler.accumulate]


def test_a_rank_without_a_share_has_an_empty_loader_and_a_window_length_that_gradsync_takes():
    shares = [build(60, 2).shard(rank=rank, world_size=3) for rank in range(3)]
    assert [len(sampler) for sampler in shares] == [0, 10, 10]
    assert [sampler.accumulate for sampler in shares] == [1, 1, 1]


def test_the_order_depends_on_seed_and_epoch_alone():
    sampler = build(50)
    first = list(sampler)
    torch.manual_seed(1)
    assert list(sampler) == list(build(50)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    other = WindowSampler(50, seed=43, micro_batch=SIZE, global_batch=24)
    assert list(other) != first


def test_without_shuffling_samples_keep_their_order():
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
        ({"micro_batch": 0}, ValueError, "micro_batch=0: need 1"),
        ({"micro_batch": 2.0}, TypeError, "micro_batch=2.0 is a float"),
        ({"seed": None}, TypeError, "seed=None is a NoneType"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"dataset": 0}, ValueError, "dataset_size=0 gives no window .* need 1 samples"),
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank=2: need 0 to 1, since num_replicas=2"),
        ({"rank": 1}, ValueError, "rank=1: need 0 to 0, since num_replicas=1; .* here 0 and 1"),
        ({"num_replicas": 0}, ValueError, "num_replicas=0: need a whole number of at"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas=2.0 is a float"),
    ],
)
def test_a_bad_argument_is_named(changes, error, message):
    options = {"dataset": 2000, "seed": 1, "micro_batch": 16, "global_batch": 64} | changes
    with pytest.raises(error, match=f"^{message}"):
        WindowSampler(**options)


@pytest.mark.parametrize("window", [3, 4])
def test_a_window_after_the_epochs_last_is_refused(window):
    with pytest.raises(ValueError, match=rf"window={window}: an epoch has 3 windows; use set_epoch\(6\)"):
        build(50).set_epoch(5, window=window)


def test_a_micro_batch_that_no_window_has_is_not_due():
    sampler = WindowSampler(6, micro_batch=2, global_batch=4)
    with pytest.raises(ValueError, match=r"due=\[1, 2\]: need indices from 0 to 1; leave due out between"):
        sampler.set_epoch(0, due=[2, 1])


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2)])
def test_a_place_outside_the_world_is_refused(rank, world):
    with pytest.raises(ValueError, match=f"rank={rank}"):
        build(50).shard(rank=rank, world_size=world)


def test_alone_a_sampler_is_rank_0_of_1():
    assert (build(50).rank, build(50).world_size) == (0, 1)


def test_a_place_may_be_given_by_the_names_of_distributed_sampler():
    for rank in range(3):
        named, shard = build(148, num_replicas=3, rank=rank), build(148).shard(rank=rank, world_size=3)
        assert (list(named), named.accumulate) == (list(shard), shard.accumulate)


class _Sized:
    """A map-style dataset of which only the length is asked."""

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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": iter([1])}, "dataset is a list_iterator without a length"),
        ({"dataset": torch.tensor(4)}, "dataset is a Tensor without a length"),
        ({"dataset": True}, "dataset=True is a bool"),
    ],
)
def test_what_has_no_length_is_refused(given, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        WindowSampler(**given, seed=1, micro_batch=1, global_batch=1)


@on_ranks(2)
def test_rank_and_world_size_default_to_the_default_group():
    sampler = build(20)
    assert (sampler.rank, sampler.world_size) == (torch.distributed.get_rank(), 2)
    assert sum(map(len, build(20, rank=0, num_replicas=1))) == 20  # all samples, whatever the group
