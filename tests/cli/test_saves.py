"""Checkpoints of `train`: the newest step that is complete on all ranks loads, whatever was interrupted."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from pyengine.cli.train import saves
from pyengine.cli.train.saves import Saves


def _state(step: int) -> dict[str, object]:
    return {"step": step, "part": torch.full((3,), float(dist.get_rank()))}


def _saved(folder: Path, *steps: int) -> Saves:
    made = Saves(folder)
    for step in steps:
        made.save(step, _state(step))
    return made


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:010}.rank-{rank}-of-2.pt"


@on_ranks(2)
def test_the_newest_step_loads_and_two_are_kept(tmp_path):
    assert Saves(tmp_path).load() is None
    step, state = _saved(tmp_path, 2, 9, 10).load()
    assert (step, state["step"], state["part"].tolist()) == (10, 10, [dist.get_rank()] * 3)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        _file(tmp_path, step, rank).name for step in (9, 10) for rank in (0, 1)
    ]


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "another save", "a link", "a pipe", "a pickle"])
@on_ranks(2)
def test_a_step_that_one_rank_has_not_as_a_whole_is_passed_over(tmp_path, how):
    made, path = _saved(tmp_path, 3, 4), _file(tmp_path, 4, 1)
    if dist.get_rank() == 1:
        content = path.read_bytes()
        if how == "another save":
            saves.write(path, {"save": "other", "state": _state(4)})
        elif how in ("empty", "cut"):
            path.write_bytes(content[: len(content) // 2 if how == "cut" else 0])
        else:
            path.unlink()
        if how == "a link":
            (tmp_path / "other").write_bytes(content)
            path.symlink_to(tmp_path / "other")
        elif how == "a pipe":
            os.mkfifo(path)
        elif how == "a pickle":
            torch.save({"save": "x", "state": Path()}, path)
    dist.barrier()
    with redirect_stderr(io.StringIO()) as told:
        assert made.load()[0] == 3
    assert ("step 4 is incomplete" in told.getvalue()) == (dist.get_rank() == 0)
    dist.barrier()
    made.save(4, _state(4))  # replaces the damaged step
    assert made.load()[0] == 4


@on_ranks(2)
def test_a_first_save_that_was_interrupted_is_no_reason_not_to_begin(tmp_path):
    made = _saved(tmp_path, 3)
    if dist.get_rank() == 1:
        _file(tmp_path, 3, 1).unlink()
    dist.barrier()
    assert made.load() is None


@on_ranks(2)
def test_steps_of_which_none_is_whole_are_refused_on_every_rank(tmp_path):
    made = _saved(tmp_path, 3, 4)
    if dist.get_rank() == 1:
        for step in (3, 4):
            _file(tmp_path, step, 1).unlink()
    dist.barrier()
    with pytest.raises(RuntimeError, match="name an empty folder to start over: .*step 4 is incomplete"):
        made.load()


@on_ranks(2)
def test_what_fails_on_one_rank_is_an_error_on_all_and_keeps_the_step_before(tmp_path):
    made = _saved(tmp_path, 3)
    save = torch.save

    def interrupted(state, file):
        save(state, file)
        raise OSError("the disk is full")

    with (
        mock.patch.object(torch, "save", interrupted if dist.get_rank() == 1 else save),
        pytest.raises(RuntimeError, match="rank 1: step 4 could not be written to .*the disk is full"),
    ):
        made.save(4, _state(4))
    assert made.load()[0] == 3
    assert not _file(tmp_path, 4, 1).exists()


@on_ranks(2)
def test_what_a_killed_process_has_left_goes_with_the_next_save(tmp_path):
    if dist.get_rank() == 0:
        (tmp_path / ".pyengine-left").mkdir()
        (tmp_path / ".pyengine-left" / "step.pt").write_bytes(b"x" * 9)
    dist.barrier()
    _saved(tmp_path, 3)
    dist.barrier()
    assert not (tmp_path / ".pyengine-left").exists()


@on_ranks(2)
def test_no_link_is_written_through(tmp_path):
    folder, outside = tmp_path / "saves", tmp_path / "outside"
    if dist.get_rank() == 0:
        folder.mkdir()
        outside.write_text("kept")
        _file(folder, 3, 0).symlink_to(outside)
    dist.barrier()
    assert _saved(folder, 3).load()[0] == 3
    assert outside.read_text() == "kept"
