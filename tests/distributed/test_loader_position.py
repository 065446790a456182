"""The position of torchdata's StatefulDataLoader, saved together with the state of an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe

pytest.importorskip("torchdata", reason="needs torchdata: requirements-dev.txt")

ACCUMULATE, EPOCHS = 2, 2
# By rank, with two samples per micro-batch: 6 windows, of which the last is short, and 2 windows.
SAMPLES = [22, 8]
# States are saved after these windows. On two ranks, rank 1 has no data in windows 3 to 6; window 6 is the
# last one of its epoch.
SAVED = [1, 3, 6, 8]


class Run:
    """A model with dropout, its optimizer and engine, and a loader that shuffles."""

    def __init__(self) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sync = pe.GradSync(self.model, accumulate=ACCUMULATE)
        data = torch.randn(SAMPLES[dist.get_rank()], 2)
        self.loader = StatefulDataLoader(data, batch_size=2, shuffle=True)
        self.first_epoch, self.position = 0, None

    def states(self, epoch: int) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "sync")}
        return copy.deepcopy({**parts, "loader": self.position, "epoch": epoch})

    def load(self, states: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "sync", "loader"):
            getattr(self, name).load_state_dict(states[name])
        self.first_epoch, self.position = states["epoch"], states["loader"]

    def with_positions(self) -> Iterator[tuple[Tensor, Any]]:
        for batch in self.loader:
            yield batch, self.loader.state_dict()

    def train(self, *, counts: bool, saves_at: int = 0) -> Any:
        """Train; return the states after window `saves_at`, or the parameters after the last window."""
        window_index = 0
        for epoch in range(self.first_epoch, EPOCHS):
            count = {"count": lambda given: len(given[0])} if counts else {}
            for window in self.sync.windows(self.with_positions(), **count):
                for x, self.position in window:
                    loss = self.model(x).square().sum()
                    self.sync.backward(loss, **({} if counts else {"count": len(x)}))
                self.sync.step(self.optimizer)
                window_index += 1
                if window_index == saves_at:
                    return self.states(epoch)
        return [param.detach() for param in self.model.parameters()]


def _resumed(saves_at: int, *, counts: bool) -> bool:
    """Return whether a saved and resumed run ends with the same bits as an uninterrupted run."""
    whole = Run()
    right = whole.train(counts=counts)
    whole.sync.close()
    saved = Run()
    states = saved.train(counts=counts, saves_at=saves_at)
    saved.sync.close()
    again = Run()
    torch.manual_seed(9)
    again.load(states)
    ends = again.train(counts=counts)
    again.sync.close()
    return all(map(torch.equal, ends, right))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("saves_at", SAVED)
@pytest.mark.parametrize("world", [1, 2])
def test_the_position_after_the_last_micro_batch_of_a_window_resumes_bit_for_bit(
    ranks, world, saves_at, counts
):
    assert all(ranks(world).run(_resumed, saves_at, counts=counts))


@on_ranks(1)
def test_between_windows_the_loader_itself_is_a_micro_batch_ahead():
    run = Run()
    window = next(run.sync.windows(run.with_positions()))
    positions = [position for _, position in window]
    assert positions[-1]["_num_yielded"] == ACCUMULATE
    assert run.loader.state_dict()["_num_yielded"] == ACCUMULATE + 1


@on_ranks(1)
def test_accumulate_reads_nothing_ahead():
    run = Run()
    for x in run.loader:
        with run.sync.accumulate():
            run.sync.backward(run.model(x).sum())
        if run.sync.is_sync_step:
            break
    assert run.loader.state_dict()["_num_yielded"] == ACCUMULATE
