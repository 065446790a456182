"""A transport in one file, whose ranks are threads of one process; docs/architecture.md shows it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyengine as pe
from pyengine.comm.base import Comm, Done
from pyengine.engine import engine_ranks


class InMemory(Comm):
    """A transport between threads: all ranks share the list `values`, and `barrier` waits for all ranks."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank=rank, world_size=len(values))
        self._values, self._barrier = values, barrier

    def all_gather_object(self, value: object) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # no rank writes its next value before all have read this one
        return values

    def all_reduce(self, flat: Tensor) -> Done:
        return Done(flat.copy_(torch.stack(self.all_gather_object(flat.clone())).sum(0)))

    def all_reduce_max(self, flat: Tensor) -> Done:
        return Done(flat.copy_(torch.stack(self.all_gather_object(flat.clone())).amax(0)))

    def broadcast_(self, tensors: list[Tensor]) -> None:
        sent = self.all_gather_object([tensor.detach().clone() for tensor in tensors])[0]
        torch._foreach_copy_([tensor.detach() for tensor in tensors], sent)


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_window_over_a_transport_of_threads(world, accumulator, monkeypatch):
    mine, values, barrier = threading.local(), [None] * world, threading.Barrier(world, timeout=30)
    monkeypatch.setattr(engine_ranks, "comm_for", lambda device, group: mine.comm)

    def train(rank: int) -> Tensor:
        mine.comm, model = InMemory(rank, values, barrier), nn.Linear(2, 1, bias=False)
        sync = pe.GradSync(model, accumulator=accumulator)
        with sync.accumulate():
            sync.backward(model(torch.full((1, 2), 1.0 + rank)).sum(), count=1)
        sync.unscale_()
        return model.weight.grad

    with ThreadPoolExecutor(world) as threads:
        for grad in threads.map(train, range(world)):
            assert grad.tolist() == [[(1 + world) / 2] * 2]
