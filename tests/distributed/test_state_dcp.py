"""States in torch.distributed.checkpoint on other numbers of ranks, and what our planner reads.

`test_state.py` tests the same number of ranks, with DCP's own planner.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Integers, integers, me
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.adapters.dcp import LoadPlanner

WIRE = pe.wire.ErrorFeedback(pe.wire.Int8())


def _made(kind: str) -> tuple[pe.Sync, torch.nn.Module]:
    torch.manual_seed(0)
    model: torch.nn.Module = Integers(torch.float32)
    if kind == "attach":
        model = DistributedDataParallel(model)
        return pe.attach(model, accumulate=1, wire=WIRE), model
    return pe.GradSync(model, accumulate=1, wire=WIRE), model


def _stops(kind: str, folder: str, how: str = "save") -> None:
    """Train two windows and save."""
    sync, model = _made(kind)
    for place in range(2):
        with sync.accumulate():
            sync.backward(model(*integers(me()[0] + place)) / 3, count=1)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    if how == "async":
        group = torch.distributed.new_group()
        dcp.async_save({"sync": sync}, checkpoint_id=folder, process_group=group).result()
    elif how == "nested":
        dcp.save({"trainer": {"engines": {"one": sync.state_dict()}}}, checkpoint_id=folder)
    else:
        dcp.save({"sync": sync}, checkpoint_id=folder)


def _goes_on(kind: str, folder: str, how: str = "engine") -> tuple[int, list[str]]:
    """Load; return the window, and the names of the ranks' parts that were read."""
    sync, _ = _made(kind)
    tree: dict[str, Any] = {"trainer": {"engines": {"one": sync.state_dict()}}}
    if how == "nested":
        dcp.load(tree, checkpoint_id=folder, planner=LoadPlanner())
        sync.load_state_dict(tree["trainer"]["engines"]["one"])
        return sync.window, [name for name in tree["trainer"]["engines"]["one"] if name.startswith("rank")]
    dcp.load({"sync": sync}, checkpoint_id=folder, planner=LoadPlanner())
    return sync.window, []


@pytest.mark.parametrize(
    "kind, world, how",
    [("own", 1, "engine"), ("own", 3, "nested"), ("own", 2, "nested"), ("attach", 3, "async")],
)
def test_an_engine_goes_on_on_any_number_of_ranks(ranks, tmp_path, kind, world, how):
    """On the same number of ranks each rank reads its own part, on other numbers that of rank 0."""
    ranks(2).run(_stops, kind, str(tmp_path), how)
    for rank, (window, read) in enumerate(ranks(world).run(_goes_on, kind, str(tmp_path), how)):
        assert window == 2
        assert read == ([f"rank {rank if world == 2 else 0} of 2"] if how == "nested" else [])


def _refused(kind: str, folder: str, planner: str) -> str:
    sync, _ = _made(kind)
    with pytest.raises((dcp.api.CheckpointException, ValueError)) as caught:
        dcp.load({"sync": sync}, checkpoint_id=folder, planner=LoadPlanner() if planner == "ours" else None)
    assert sync.window == 0
    return str(caught.value)


def test_on_another_number_of_ranks_the_planner_is_needed(ranks, tmp_path):
    ranks(2).run(_stops, "own", str(tmp_path))
    for rank, message in enumerate(ranks(3).run(_refused, "own", str(tmp_path), "dcp's")):
        assert f"Missing key in checkpoint state_dict: sync.rank {rank} of 3" in message


@on_ranks(1)
def test_an_engine_that_is_not_in_the_checkpoint_is_a_missing_key(tmp_path):
    dcp.save({"synch": {"rank 0 of 2": 1}, "sync rank": torch.ones(1)}, checkpoint_id=str(tmp_path))
    message = _refused("own", str(tmp_path), "ours")
    assert "Missing key in checkpoint state_dict: sync." in message


class Evil:
    """An object that creates a folder when it is unpickled."""

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
    refused = r"epoch' cannot be read: it holds \w+\.mkdir, which is neither a tensor nor a plain value"
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
    # DCP's own planner loses values if it flattens only sharded tensors.
    planner = LoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    dcp.load(loaded, checkpoint_id=folder, planner=planner)
    assert loaded == saved
