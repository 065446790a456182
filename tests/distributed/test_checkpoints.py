"""Checkpoints in a folder: whole or not at all, on every rank alike."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import me, recorded_warnings
from ranks import on_ranks
from torch import nn

import pyengine as pe
from pyengine.checkpoint import state_file
from pyengine.checkpoint.state_file import Origin

STATE = {"weights": torch.arange(1000, dtype=torch.float32), "step": 3, "name": "run"}


def _state(step: int, rank: int) -> dict[str, Any]:
    return {"weights": torch.full((100,), float(step)), "rank": rank}


def _step_of(path: Path) -> int:
    return int(path.name[5:15])


def _steps(folder: Path) -> list[int]:
    return sorted({_step_of(path) for path in folder.glob("step-*.pt")})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "one.pt"
    state_file.write(path, Origin(3, 0, 1, "save"), STATE)
    return path


# --- One file ---


def test_a_file_comes_back_as_it_was(saved):
    assert state_file.check(saved) == Origin(3, 0, 1, "save")
    found = state_file.read(saved)
    assert torch.equal(found.pop("weights"), STATE["weights"])
    assert found == {"step": 3, "name": "run"}
    assert [path.name for path in saved.parent.iterdir()] == ["one.pt"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(
            (lambda whole, share=share: whole[: int(share * len(whole))], "^truncated")
            for share in (0, 0.02, 0.7, 0.9999)
        ),
        (lambda whole: bytes(len(whole)), "^truncated: it has no header"),  # as a power cut leaves it
        (lambda _: b"PK\3\4 of torch.save itself, for example", "^no checkpoint of pyengine"),
    ],
)
def test_what_is_no_whole_file_is_refused(saved, content, says):
    saved.write_bytes(content(saved.read_bytes()))
    with pytest.raises(ValueError, match=says):
        state_file.check(saved)


def test_every_flipped_bit_is_found(saved):
    content, generator = saved.read_bytes(), random.Random(1)
    for place in [*range(0, 150, 7), *(generator.randrange(256, len(content)) for _ in range(100))]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        saved.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"damaged|truncated|no checkpoint"):
            state_file.check(saved)


class Evil:
    """Would leave a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def test_no_code_of_a_file_runs(tmp_path, monkeypatch):
    path, made = tmp_path / "one.pt", tmp_path / "made"
    monkeypatch.setattr(state_file, "check_loads", lambda file: None)
    state_file.write(path, Origin(0, 0, 1, ""), Evil(made))
    state_file.check(path)
    with pytest.raises(ValueError, match=r"holds \w+\.mkdir, which is neither a tensor nor a plain value"):
        state_file.read(path)
    assert not made.exists()


# --- A folder, one rank ---


def test_the_newest_step_loads_and_two_are_kept(tmp_path):
    checkpoints = pe.Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load() is None
    for step in (1, 2, 5, 9):
        checkpoints.save(step, _state(step, 0))
    assert _steps(tmp_path / "new" / "folder") == [5, 9]
    found = pe.Checkpoints(tmp_path / "new" / "folder").load()
    assert found.step == 9
    assert torch.equal(found.state["weights"], torch.full((100,), 9.0))


@pytest.mark.parametrize("step", [12, 20])
def test_a_damaged_newest_step_is_passed_over_named_and_replaced(tmp_path, step):
    checkpoints = pe.Checkpoints(tmp_path)
    for saved in (10, 20):
        checkpoints.save(saved, _state(saved, 0))
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    again = pe.Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match=r"step 20 is not whole \(rank 0: .*truncated.*from an earlier step"):
        assert again.load().step == 10
    again.save(step, _state(step, 0))
    assert _steps(tmp_path) == [10, step]
    assert pe.Checkpoints(tmp_path).load().step == step


def test_a_folder_without_a_whole_step_is_refused_with_the_reasons(tmp_path):
    pe.Checkpoints(tmp_path).save(4, _state(4, 0))
    next(tmp_path.iterdir()).write_bytes(b"something else, long enough")
    with pytest.raises(
        ValueError, match=r"^no checkpoint in .* is whole: step 4 .*no checkpoint of pyengine"
    ):
        pe.Checkpoints(tmp_path).load()


def test_a_newer_format_is_not_passed_over(tmp_path, monkeypatch):
    checkpoints = pe.Checkpoints(tmp_path)
    checkpoints.save(1, _state(1, 0))
    with monkeypatch.context() as newer:
        newer.setattr(state_file, "FORMAT", 7)
        checkpoints.save(2, _state(2, 0))
    with pytest.raises(ValueError, match=r"^step 2 in .* is of format 7, .* reads up to 1: update it"):
        pe.Checkpoints(tmp_path).load()


def test_a_renamed_file_is_refused(tmp_path):
    pe.Checkpoints(tmp_path).save(4, _state(4, 0))
    path = next(tmp_path.iterdir())
    path.rename(path.with_name(path.name.replace("4.rank", "5.rank")))
    with pytest.raises(ValueError, match="is that of step 4, rank 0, renamed"):
        pe.Checkpoints(tmp_path).load()


def test_another_runs_folder_is_not_written_to(tmp_path):
    pe.Checkpoints(tmp_path).save(40, _state(40, 0))
    with pytest.raises(ValueError, match=r"step=0: .* holds step 40, of another run"):
        pe.Checkpoints(tmp_path).save(0, _state(0, 0))


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 2**63])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match="step=.*: need a whole number of at least 0"):
        pe.Checkpoints(tmp_path).save(step, {})


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_a_number_to_keep_that_is_none_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="^keep=.*: need a whole number of steps"):
        pe.Checkpoints(tmp_path, keep=keep)


def test_a_file_whose_name_says_a_huge_number_of_ranks_costs_nothing(tmp_path, monkeypatch):
    pe.Checkpoints(tmp_path).save(1, _state(1, 0))
    for name in ("step-0000000002.rank-0-of-3000000.pt", "step-0000000003.rank-5-of-2.pt"):
        (tmp_path / name).write_bytes(b"")
    calls, path = [], pe.Checkpoints._path
    monkeypatch.setattr(pe.Checkpoints, "_path", lambda *args: calls.append(args) or path(*args))
    with pytest.warns(
        UserWarning, match=r"step 2 is not whole \(rank 0: step-0+2.rank-0-of-3000000.pt is trunc"
    ):
        assert pe.Checkpoints(tmp_path).load().step == 1
    assert len(calls) < 50


# --- A process that dies while it writes ---


def _many(step: int) -> dict[str, torch.Tensor]:
    return {str(index): torch.full((10,), float(step)) for index in range(500)}


def _write_for_ever(folder: str) -> None:
    checkpoints = pe.Checkpoints(folder)
    found = checkpoints.load()
    step = 0 if found is None else found.step
    while True:
        step += 1
        checkpoints.save(step, _many(step))  # most of the time goes into the file


def test_a_kill_in_mid_write_loses_no_step_that_was_whole(tmp_path):
    generator, last = random.Random(3), 0
    for _ in range(4):  # tests/faults kills two hundred times
        writer = mp.get_context("fork").Process(target=_write_for_ever, args=(str(tmp_path),))
        writer.start()
        end = time.monotonic() + 20
        while not any(tmp_path.glob("step-*")) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(generator.random() * 0.03)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill damages no file that has its name
            found = pe.Checkpoints(tmp_path).load()
        assert found.step >= last
        assert all(torch.equal(found.state[name], want) for name, want in _many(found.step).items())
        last = found.step
    assert last > 0
    assert len(_steps(tmp_path)) <= 3


# --- Several ranks ---


def _trained(folder: str, steps: int, keep: int = 2) -> list[float]:
    """Go on from the newest step, and return the parameters and the steps that this run has taken."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sync, optimizer = pe.GradSync(model), torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = pe.Checkpoints(folder, keep=keep)
    found, start = checkpoints.load(), 0
    if found is not None:
        start = found.step
        model.load_state_dict(found.state["model"])
        sync.load_state_dict(found.state["sync"])
    for step in range(start, steps):
        with sync.accumulate():
            sync.backward(model(torch.full((2, 3), step + me()[0] + 1.0)).square().sum(), count=2)
        sync.step(optimizer)
        checkpoints.save(step + 1, {"model": model.state_dict(), "sync": sync.state_dict()})
    return [*(v for p in model.parameters() for v in p.flatten().tolist()), float(start)]


@pytest.mark.parametrize("world", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(ranks, tmp_path, world):
    *undisturbed, _ = ranks(world).run(_trained, str(tmp_path / "one"), 4)[0]
    ranks(world).run(_trained, str(tmp_path / "other"), 2)
    *continued, start = ranks(world).run(_trained, str(tmp_path / "other"), 4)[0]
    assert (continued, start) == (undisturbed, 2.0)


def _loaded(folder: str) -> tuple[int, list[str], str]:
    with recorded_warnings() as messages:
        try:
            found = pe.Checkpoints(folder).load()
        except ValueError as error:
            return -1, [], str(error)
    return found.step, messages, ""


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def _of_another_save(path: Path) -> None:
    step = _step_of(path)
    state_file.write(path, Origin(step, 1, 2, "another save"), _state(step, 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "rank 1: step-0000000003.rank-1-of-2.pt is not there"),
        (_cut, "rank 1: step-0000000003.rank-1-of-2.pt is truncated"),
        (_of_another_save, "its parts are of different saves"),
    ],
)
def test_a_step_counts_only_as_a_whole_and_all_ranks_load_the_same(
    ranks, tmp_path, damage: Callable[[Path], None], reason
):
    ranks(2).run(_trained, str(tmp_path), 3)
    damage(tmp_path / "step-0000000003.rank-1-of-2.pt")
    for step, warned, error in ranks(2).run(_loaded, str(tmp_path)):
        assert (step, error) == (2, "")
        assert len(warned) == 1 and re.search(rf"step 3 is not whole \({reason}", warned[0])


def _loaded_at_first(folder: str) -> tuple[list[str], float]:
    with recorded_warnings() as messages:
        start = _trained(folder, 3)[-1]
    return messages, start


@pytest.mark.parametrize("how", ["a part is missing", "parts of two saves"])
def test_a_first_save_that_was_interrupted_is_no_reason_not_to_begin(ranks, tmp_path, how):
    ranks(2).run(_trained, str(tmp_path), 1)
    path = tmp_path / "step-0000000001.rank-1-of-2.pt"
    path.unlink()
    if how == "parts of two saves":
        state_file.write(path, Origin(1, 1, 2, "another save", is_first=True), _state(1, 1))
    for warned, start in ranks(2).run(_loaded_at_first, str(tmp_path)):
        assert start == 0.0
        assert len(warned) == 1 and re.search(
            "it was the first one: there is nothing to go on from", warned[0]
        )
    assert ranks(2).run(_loaded, str(tmp_path)) == [(3, [], "")] * 2


@pytest.mark.parametrize("how", ["not the first", "damaged"])
def test_a_step_that_may_have_been_whole_is_not_passed_over_for_the_beginning(ranks, tmp_path, how):
    ranks(2).run(_trained, str(tmp_path), 2 if how == "not the first" else 1, 1)
    (path,) = tmp_path.glob("*.rank-1-of-2.pt")
    (Path.unlink if how == "not the first" else _cut)(path)
    for step, _, error in ranks(2).run(_loaded, str(tmp_path)):
        assert step == -1 and re.search("no checkpoint in .* is whole", error)


def test_another_number_of_ranks_is_refused_and_gets_all_states(ranks, tmp_path):
    ranks(3).run(_trained, str(tmp_path), 2)
    for step, _, error in ranks(2).run(_loaded, str(tmp_path)):
        assert step == -1 and re.search("of step 2, is of 3 ranks, and there are 2: start as many", error)
    assert ranks(2).run(_all, str(tmp_path)) == [(2, ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"])] * 2


def _all(folder: str) -> tuple[int, list[str]]:
    found = pe.Checkpoints(folder).load_all()
    return found.step, [key for state in found.states for key in state["sync"] if key.startswith("rank")]


def _save_again(folder: str, step: int) -> None:
    pe.Checkpoints(folder).save(step, _state(step, me()[0]))


def test_a_step_that_another_number_of_ranks_saves_again_is_replaced(ranks, tmp_path):
    ranks(3).run(_trained, str(tmp_path), 2)
    ranks(2).run(_save_again, str(tmp_path), 2)
    assert ranks(2).run(_loaded, str(tmp_path)) == [(2, [], "")] * 2
    assert _steps(tmp_path) == [1, 2]


@on_ranks(2)
def test_ranks_that_save_different_steps_are_refused_and_the_step_before_loads(tmp_path):
    rank, _ = me()
    checkpoints = pe.Checkpoints(tmp_path)
    checkpoints.save(1, _state(1, rank))
    with pytest.raises(ValueError, match=r"^step=\[2, 3\] by rank: need the same on every rank"):
        checkpoints.save(2 + rank, _state(2, rank))
    assert pe.Checkpoints(tmp_path).load().step == 1


def _raise(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "not yours")


@pytest.mark.parametrize(
    ("call", "method", "message"),
    [
        ("save", "_found", "cannot be used"),
        ("save", "write", "step 2 could not be written"),
        ("save", "_remove_old", "step 2 was saved, and older files in .* could not be removed"),
        ("load", "_found", "cannot be read"),
        ("load", "_check", "step 1 in .* cannot be read"),
        ("load", "read", "step 1 in .* cannot be loaded"),
    ],
)
@on_ranks(2)
def test_what_fails_on_one_rank_is_an_error_on_all_of_them(tmp_path, call, method, message):
    checkpoints = pe.Checkpoints(tmp_path)
    checkpoints.save(1, {})
    with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, ValueError)) as error:
        if me()[0] == 1:
            patch.setattr(state_file if method in ("read", "write") else checkpoints, method, _raise)
        checkpoints.load() if call == "load" else checkpoints.save(2, {})
    assert re.match(rf"rank 1: .*{message}.*PermissionError: .*not yours", str(error.value))
    assert pe.Checkpoints(tmp_path).load().step == (2 if method == "_remove_old" else 1)
