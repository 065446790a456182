"""States in torch.distributed.checkpoint on other numbers of ranks, and what our planner reads.

`test_state.py` has those of the same ranks, by DCP's own planner.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Integers, integers, me
from ranks import on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.adapters.dcp import LoadPlanner

EXACT = pe.Exact(micro_batches=6)


def _gradient(sync: pe.Sync, model: torch.nn.Module, *, stop: int = 6) -> list[Tensor]:
    """Run what is due of a window of six micro-batches, or some of it; return its gradient."""
    for place in sync.due[:stop]:
        with sync.accumulate():
            sync.backward(model(*integers(place)) / 3, count=1)
    if stop != 6:
        return []
    sync.flush()  # where nothing was due
    sync.unscale_()
    return [p.grad.clone() for p in model.parameters()]


def _made(kind: str) -> tuple[pe.Sync, torch.nn.Module]:
    model: torch.nn.Module = Integers(torch.float32)
    accumulator: Any = EXACT if "exact" in kind else "fp32"
    rank, world = me()
    accumulate = (rank + 1) * 6 // world - rank * 6 // world  # as WindowSampler deals six out
    if "attach" in kind:
        model = DistributedDataParallel(model)
        return pe.attach(model, accumulate=accumulate, accumulator=accumulator), model
    return pe.GradSync(model, accumulate=accumulate, accumulator=accumulator), model


def _stops(kind: str, folder: str, how: str = "save") -> None:
    """Save in an open window, of which rank 1 has done one micro-batch less."""
    sync, model = _made(kind)
    _gradient(sync, model, stop=2 - me()[0])
    if how == "async":
        group = torch.distributed.new_group()
        dcp.async_save({"sync": sync}, checkpoint_id=folder, process_group=group).result()
    elif how == "nested":
        dcp.save({"trainer": {"engines": {"one": sync.state_dict()}}}, checkpoint_id=folder)
    else:
        dcp.save({"sync": sync}, checkpoint_id=folder)


def _goes_on(kind: str, folder: str, how: str = "engine") -> list[Tensor]:
    sync, model = _made(kind)
    if how == "nested":
        tree = {"trainer": {"engines": {"one": sync.state_dict()}}}
        dcp.load(tree, checkpoint_id=folder, planner=LoadPlanner())
        sync.load_state_dict(tree["trainer"]["engines"]["one"])
    elif folder:
        dcp.load({"sync": sync}, checkpoint_id=folder, planner=LoadPlanner())
    done = 3 if folder else 0
    assert sum(_gathered(len(sync.due))) == 6 - done
    return _gradient(sync, model)


def _gathered(number: int) -> list[int]:
    numbers: list[Any] = [None] * me()[1]
    torch.distributed.all_gather_object(numbers, number)
    return numbers


@pytest.mark.parametrize(
    "kind, world, how",
    [
        ("own exact", 1, "engine"),
        ("own exact", 4, "nested"),
        ("attach exact", 3, "async"),
    ],
)
def test_exact_sums_go_on_on_another_number_of_ranks(ranks, tmp_path, kind, world, how):
    ranks(2).run(_stops, kind, str(tmp_path), how)
    (whole,) = ranks(1).run(_goes_on, "own exact", "")
    for gradient in ranks(world).run(_goes_on, kind, str(tmp_path), how):
        assert all(map(torch.equal, gradient, whole))


@on_ranks(2)
def test_on_as_many_ranks_the_planner_reads_no_part_of_others(tmp_path):
    _stops("own exact", str(tmp_path))
    sync, _ = _made("own exact")
    checkpoint = {"sync": sync.state_dict()}
    dcp.load(checkpoint, checkpoint_id=str(tmp_path), planner=LoadPlanner())
    assert sorted(checkpoint["sync"]) == [f"rank {me()[0]} of 2", "steps", "version", "window"]


def _refused(kind: str, folder: str, planner: str) -> str:
    sync, _ = _made(kind)
    before = sync.window, sync.due
    with pytest.raises((dcp.api.CheckpointException, ValueError)) as caught:
        dcp.load({"sync": sync}, checkpoint_id=folder, planner=LoadPlanner() if planner == "ours" else None)
    assert (sync.window, sync.due) == before
    return str(caught.value)


def test_on_another_number_of_ranks_the_planner_is_needed_and_exact_sums(ranks, tmp_path):
    ranks(2).run(_stops, "own", str(tmp_path))
    for rank, message in enumerate(ranks(3).run(_refused, "own", str(tmp_path), "dcp's")):
        assert f"Missing key in checkpoint state_dict: sync.rank {rank} of 3" in message
    for message in ranks(3).run(_refused, "own", str(tmp_path), "ours"):
        assert "only accumulator='exact'" in message


@on_ranks(1)
def test_an_engine_that_is_not_in_the_checkpoint_is_a_missing_key(tmp_path):
    dcp.save({"synch": {"rank 0 of 2": 1}, "sync rank": torch.ones(1)}, checkpoint_id=str(tmp_path))
    message = _refused("own exact", str(tmp_path), "ours")
    assert "Missing key in checkpoint state_dict: sync." in message


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("flat", [True, False])
@on_ranks(2)
def test_no_code_of_a_checkpoint_runs(tmp_path, flat):
    folder, made = str(tmp_path / "folder"), tmp_path / "made"
    dcp.save({"trainer": {"epoch": Evil(str(made))}, "epoch": Evil(str(made))}, checkpoint_id=folder)
    tree = {"trainer": {"epoch": 0}} if flat else {"epoch": 0}
    refused = r"epoch': the state holds \w+\.mkdir, which is neither a tensor"
    with pytest.raises(dcp.api.CheckpointException, match=refused):
        dcp.load(tree, checkpoint_id=folder, planner=LoadPlanner(flatten_state_dict=flat))
    assert not made.exists()


@pytest.mark.parametrize("flat", [True, False])
@on_ranks(1)
def test_plain_values_of_a_checkpoint_come_back(tmp_path, flat):
    folder = str(tmp_path)
    saved = {"epoch": 3, "name": "run", "more": {"list": [1, None, {"a": (1.5, b"x")}]}}
    saved = saved if flat else {"epoch": 3, "name": "run"}
    dcp.save(saved, checkpoint_id=folder)
    loaded: dict[str, Any] = {"epoch": 0, "name": ""}
    if flat:
        loaded["more"] = {"list": [0, 0, {"a": 0}]}
    # DCP's own planner loses values where it flattens sharded tensors alone.
    planner = LoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    dcp.load(loaded, checkpoint_id=folder, planner=planner)
    assert loaded == saved
