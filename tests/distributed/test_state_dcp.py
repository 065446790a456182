"""States in a checkpoint of torch.distributed.checkpoint,
which takes equal names on several ranks for copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Integers, integers, me
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE, STOP = 3, 5  # in the middle of the second window
EXACT = pe.Exact(micro_batches=6)


def _make(kind: str, accumulate: int = ACCUMULATE) -> tuple[pe.Sync, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(me()[0])  # each rank draws its own
    model: torch.nn.Module = Integers(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if kind == "attach":
        model = DistributedDataParallel(model)
        return pe.attach(model, accumulate=accumulate), model, optimizer
    accumulator: Any = "exact" if kind == "exact" else "fp32"
    return pe.GradSync(model, accumulate=accumulate, accumulator=accumulator), model, optimizer


def _train(
    kind: str, *, to: int, save: Callable[[dict[str, Any]], None], load: Callable[[dict[str, Any]], None]
) -> Any:
    """Train from what `load` brings, up to micro-batch `to`, then save; return the parameters."""
    sync, model, optimizer = _make(kind)
    checkpoint = {"model": model.state_dict(), "sync": sync}
    load(checkpoint)
    model.load_state_dict(checkpoint["model"])
    begin = sync.window * ACCUMULATE + ACCUMULATE - len(sync.due)
    for index in range(begin, to):
        with sync.accumulate():
            x, t = integers(100 * me()[0] + index)
            sync.backward(model(x, t) * torch.rand(()), count=1 + me()[0])
            if sync.is_sync_step:
                sync.step(optimizer)
    save({"model": model.state_dict(), "sync": sync})
    return [p.detach().clone() for p in model.parameters()]


def _nothing(checkpoint: dict[str, Any]) -> None:
    pass


def _interrupted(kind: str, how: str, folder: str) -> bool:
    """Train with a checkpoint in the middle of a window, and compare with a run without one."""

    def save(checkpoint: dict[str, Any]) -> None:
        if how == "state":
            checkpoint["sync"] = checkpoint["sync"].state_dict()
        dcp.save(checkpoint, checkpoint_id=folder)

    def load(checkpoint: dict[str, Any]) -> None:
        sync = checkpoint["sync"]
        if how == "state":
            checkpoint["sync"] = sync.state_dict()
        dcp.load(checkpoint, checkpoint_id=folder)
        if how == "state":
            sync.load_state_dict(checkpoint["sync"])

    _train(kind, to=STOP, save=save, load=_nothing)
    resumed = _train(kind, to=9, save=_nothing, load=load)
    whole = _train(kind, to=9, save=_nothing, load=_nothing)
    return all(map(torch.equal, resumed, whole))


@pytest.mark.parametrize("how", ["engine", "state"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["own", "exact", "attach"])
def test_every_rank_gets_its_own_sums_back(ranks, tmp_path, kind, world, how):
    assert all(ranks(world).run(_interrupted, kind, how, str(tmp_path)))


# Another number of ranks.


def _gradient(sync: pe.Sync, model: torch.nn.Module, *, stop: int = 6) -> list[Tensor]:
    """Run what is due of a window of six micro-batches, or some of it; return its gradient."""
    for place in sync.due[:stop]:
        with sync.accumulate():
            sync.backward(model(*integers(place)) / 3, count=1)
            if sync.is_sync_step:
                sync.unscale_()
    return [p.grad.clone() for p in model.parameters()] if stop == 6 else []


def _made(kind: str) -> tuple[pe.Sync, torch.nn.Module]:
    model = Integers(torch.float32)
    accumulator: Any = EXACT if kind == "exact" else "fp32"
    return pe.GradSync(model, accumulate=6 // me()[1], accumulator=accumulator), model


def _stops(kind: str, folder: str) -> None:
    sync, model = _made(kind)
    _gradient(sync, model, stop=2)
    dcp.save({"sync": sync}, checkpoint_id=folder)


def _goes_on(folder: str) -> list[Tensor]:
    """Go on as the page says."""
    sync, model = _made("exact")
    if folder:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        parts: dict[str, Any] = {name: None for name in saved if name.startswith("sync.")}
        dcp.load(parts, checkpoint_id=folder)
        sync.load_state_dict({name.removeprefix("sync."): part for name, part in parts.items()})
    assert len(sync.due) == (6 if not folder else 2) // me()[1]
    return _gradient(sync, model)


@pytest.mark.parametrize("last", [1, 2])
def test_exact_sums_go_on_on_another_number_of_ranks(ranks, tmp_path, last):
    ranks(2).run(_stops, "exact", str(tmp_path))
    (whole,) = ranks(1).run(_goes_on, "")
    for gradient in ranks(last).run(_goes_on, str(tmp_path)):
        assert all(map(torch.equal, gradient, whole))


def _refused(kind: str, folder: str) -> str:
    sync, _ = _made(kind)
    before = sync.state_dict()["window"], sync.due
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"sync": sync}, checkpoint_id=folder)
    assert (sync.state_dict()["window"], sync.due) == before
    return str(caught.value)


@pytest.mark.parametrize("kind", ["own", "exact"])
def test_an_engine_on_another_number_of_ranks_finds_no_part_of_its_own(ranks, tmp_path, kind):
    ranks(2).run(_stops, kind, str(tmp_path))
    for rank, message in enumerate(ranks(3).run(_refused, kind, str(tmp_path))):
        assert f"Missing key in checkpoint state_dict: sync.rank {rank} of 3" in message
