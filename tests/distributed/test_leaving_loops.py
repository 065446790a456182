"""Which micro-batch comes next after `break` has left a loop over windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from ranks import on_ranks
from sharded_cases import sharded
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pyengine as pe

NUM, ACCUMULATE = 10, 3


class Numbers:
    """Micro-batches 0 to NUM - 1; `read` lists those that a loop has read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(NUM):
            self.read.append(number)
            yield torch.tensor(number)


def _train(
    sync: pe.Sync, model: nn.Module, windows: Iterable[Iterator[Tensor]], *, num: int, size: int = ACCUMULATE
) -> list[list[int]]:
    """Train up to `num` windows of at most `size` micro-batches; return the micro-batches of each."""
    seen: list[list[int]] = []
    for window in windows:
        seen.append([])
        for x in window:
            seen[-1].append(int(x))
            sync.backward(sum(param.sum() for param in model.parameters()), count=1)
            if len(seen[-1]) == size:
                break
        sync.flush()
        sync.unscale_()
        if len(seen) == num:
            break
    sync.synchronize()
    return seen


def _engine() -> tuple[pe.Sync, nn.Module]:
    model = nn.Linear(2, 1)
    return pe.GradSync(model, accumulate=ACCUMULATE), model


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_the_same_loop_goes_on_with_the_next_micro_batch():
    sync, model = _engine()
    windows = sync.windows(iter(Numbers()))
    assert _train(sync, model, windows, num=1, size=2) == [[0, 1]]
    assert _train(sync, model, windows, num=2) == [[2, 3, 4], [5, 6, 7]]
    assert _train(sync, model, windows, num=9) == [[8, 9]]


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_a_new_loop_begins_a_loader_anew_and_an_iterator_behind_what_was_read_ahead():
    loader = DataLoader(torch.arange(NUM), batch_size=None)
    for source, first in ((loader, 0), (list(loader), 0), (iter(loader), 4)):
        sync, model = _engine()
        assert _train(sync, model, sync.windows(source), num=1) == [[0, 1, 2]]
        assert _train(sync, model, sync.windows(source), num=1) == [[first, first + 1, first + 2]]


@pytest.mark.parametrize(
    ("world", "kind", "size", "read"),
    [(1, "own", 1, 2), (2, "own", 1, 2), (2, "counted", 1, 3), (2, "counted", 3, 4), (2, "sharded", 1, 4)],
)
@on_ranks()
def test_a_loop_reads_a_micro_batch_ahead_or_the_rest_of_the_window(kind, size, read):
    sync, _ = sharded("flat", accumulate=ACCUMULATE) if kind == "sharded" else _engine()
    numbers, count = Numbers(), (lambda _: 1) if kind == "counted" else None
    window = next(windows := sync.windows(numbers, count=count))
    assert [int(next(window)) for _ in range(size)] == list(range(size))
    assert numbers.read == list(range(read))
    windows.close()
    sync.abandon()
