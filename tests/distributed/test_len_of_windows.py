"""`len(sync.windows(loader))`: the number of windows that the loop has over all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from cases import error_of, me, typed_error_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pyengine as pe


def _engine(accumulate: int) -> tuple[nn.Module, pe.Sync]:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    return model, pe.GradSync(model, accumulate=accumulate)


@pytest.mark.parametrize(("world", "accumulate", "want"), [(1, 4, 2), (2, 3, 3), (3, 2, 5)])
@on_ranks()
def test_it_is_the_number_of_windows_over_all_ranks(accumulate, want):
    rank, _ = me()
    model, sync = _engine(accumulate)
    batches = list(torch.ones(5 + 2 * rank, 1, 2))  # rank 2 has 9 micro-batches
    loop = sync.windows(batches)
    assert rank or bool(loop)  # only rank 0 calls it
    assert len(loop) == want
    assert rank or len(loop) == want  # only rank 0 calls it again
    seen = 0
    for window in loop:
        for x in window:
            sync.backward(model(x).sum())
        sync.unscale_()
        seen += 1
    assert seen == want


@on_ranks(2)
def test_a_loader_counts_its_batches_and_a_short_window_is_one():
    _, sync = _engine(4)
    loader = DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=1)
    assert len(sync.windows(loader)) == 3


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(3, 2))


class Unknown(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("stream", [Stream, Unknown])
@on_ranks(2)
def test_a_loader_without_a_length_on_one_rank_is_a_type_error_on_every_rank(stream):
    rank, _ = me()
    _, sync = _engine(2)
    loader = DataLoader(stream()) if rank else [torch.ones(1, 2)]
    text = typed_error_of(lambda: len(sync.windows(loader)))
    assert text.startswith("TypeError: len(sync.windows(loader)): ")
    assert ("another rank" in text) is (rank == 0) and "total=" in text
    assert len(sync.windows([torch.ones(1, 2)])) == 1  # the engine still works


@on_ranks(2)
def test_a_progress_bar_asks_also_where_it_is_disabled():
    tqdm = pytest.importorskip("tqdm").tqdm
    rank, _ = me()
    model, sync = _engine(2)
    bar = tqdm(sync.windows(list(torch.ones(3, 1, 2))), disable=rank > 0, file=io.StringIO())
    for window in bar:
        for x in window:
            sync.backward(model(x).sum())
        sync.unscale_()
    assert rank > 0 or (bar.n, bar.total) == (2, 2)


@on_ranks(2)
def test_a_rank_that_asks_alone_is_an_error_on_every_rank():
    rank, _ = me()
    model, sync = _engine(1)

    def loop() -> None:
        windows = sync.windows([torch.ones(1, 2)])
        if rank == 0:
            len(windows)
        for window in windows:
            for x in window:
                sync.backward(model(x).sum())

    text = error_of(loop)
    assert "ranks are at different points of their loops" in text and "len(sync.windows(loader))" in text
    assert "Make these calls on every rank or on none" in text
