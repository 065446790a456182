"""Commands never write a file through a symbolic link at its path; see SECURITY.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine.cli.arguments import Conflict, check_writable
from pyengine.cli.bench import run as bench_run
from pyengine.cli.bench.arguments import settings as bench_settings
from pyengine.cli.files import fresh, make_folder, regular, written
from pyengine.cli.main import build_parser, main
from pyengine.cli.study.store import Store
from pyengine.cli.train import run as train_run
from pyengine.cli.train.arguments import check_resumed, settings


@pytest.fixture
def victim(tmp_path):
    """Create a file that stands for another user's file, and check that it does not change."""
    file = tmp_path / "victim"
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"
    assert not file.is_symlink()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_file_takes_the_place_of_a_link(folder, victim):
    (folder / "page.html").symlink_to(victim)
    with written(folder / "page.html") as part:
        assert part.suffix == ".html" and part.parent.stat().st_mode & 0o077 == 0
        part.write_text("page")
    assert not (folder / "page.html").is_symlink()
    assert (folder / "page.html").read_text() == "page"
    assert os.listdir(folder) == ["page.html"]


def test_a_file_that_is_not_whole_leaves_the_earlier_one(folder):
    (folder / "page.html").write_text("earlier")
    with pytest.raises(RuntimeError, match="midway"), written(folder / "page.html") as part:
        part.write_text("pa")
        raise RuntimeError("midway")
    assert (folder / "page.html").read_text() == "earlier"
    assert os.listdir(folder) == ["page.html"]


def test_a_file_is_made_with_the_umask_of_the_user(folder):
    before = os.umask(0o027)
    try:
        with written(folder / "page.html") as part:
            part.write_text("page")
    finally:
        os.umask(before)
    assert (folder / "page.html").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("mode", ["r", "w", "a", "ab+"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_nothing_but_a_regular_file_is_opened(folder, victim, kind, mode):
    path = folder / "file"
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/null")
    with pytest.raises(OSError, match="a symbolic link|not a regular file|No such device"):
        open(path, mode, opener=regular).close()


def test_a_folder_is_made_once_and_is_no_link(folder, tmp_path):
    make_folder(folder / "logs")
    make_folder(folder / "logs")
    (folder / "plots").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        make_folder(folder / "plots")


# ---- every command ----


def test_the_lock_of_a_training_empties_no_other_file(folder, victim):
    (folder / ".lock").symlink_to(victim)
    with (
        pytest.raises(Conflict, match=r"argument --checkpoints: cannot write .*\.lock \(a symbolic link"),
        train_run.locked(folder),
    ):
        pass


def test_the_lock_of_a_training_keeps_a_file_of_that_name(folder, victim):
    os.link(victim, folder / ".lock")
    with train_run.locked(folder):
        pass


def test_settings_of_a_training_take_the_place_of_a_link(folder, victim):
    made = settings(build_parser().parse_args(["train", "--model", "cnn", "--checkpoints", str(folder)]))
    (folder / "cnn" / "settings.json").symlink_to(victim)
    (folder / "cnn" / f".settings-{os.getpid()}").symlink_to(victim)
    check_resumed(made, "cnn", folder / "cnn")
    assert "workers" in json.loads((folder / "cnn" / "settings.json").read_text())


def test_settings_behind_a_link_are_not_read(folder, tmp_path):
    made = settings(build_parser().parse_args(["train", "--model", "cnn", "--checkpoints", str(folder)]))
    (folder / "cnn" / "step-2.rank-0-of-2.pt").touch()
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "cnn" / "settings.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(Conflict, match=r"settings\.json has no settings .*symbolic link.*: delete it"):
        check_resumed(made, "cnn", folder / "cnn")


def test_checkpoints_are_refused_behind_a_link_within_their_folder(folder, tmp_path):
    (folder / "cnn").symlink_to(tmp_path)
    options = build_parser().parse_args(["train", "--model", "cnn", "--checkpoints", str(folder)])
    with pytest.raises(Conflict, match=r"cannot create .*cnn \(a symbolic link, which is not followed\)"):
        settings(options)


def test_a_folder_that_the_user_names_may_be_a_link(folder, tmp_path):
    (tmp_path / "disk").symlink_to(folder)
    settings(build_parser().parse_args(["train", "--model", "cnn", "--checkpoints", str(tmp_path / "disk")]))
    assert (folder / "cnn").is_dir()


@pytest.mark.parametrize("target", ["victim", "absent"])
@pytest.mark.parametrize("argument", ["--out", "--trace"])
def test_a_file_that_is_named_is_no_link(folder, victim, target, argument):
    (folder / "file.json").symlink_to(victim.with_name(target))
    with pytest.raises(Conflict, match=f"argument {argument}: cannot write .*symbolic link"):
        check_writable(argument, folder / "file.json")
    assert not victim.with_name("absent").exists()
    assert (folder / "file.json").is_symlink()


def test_a_file_that_can_be_written_is_not_made_and_not_changed(folder):
    check_writable("--out", folder / "new.json")
    assert not os.listdir(folder)
    (folder / "there.json").write_text("there")
    check_writable("--out", folder / "there.json")
    assert os.listdir(folder) == ["there.json"] and (folder / "there.json").read_text() == "there"
    with pytest.raises(Conflict, match="name a file in a folder that exists and is writable"):
        check_writable("--out", folder / "absent" / "new.json")


def test_the_runs_of_a_study_are_not_appended_to_another_file(folder, victim):
    (folder / "runs.jsonl").symlink_to(victim)
    with pytest.raises(Conflict, match=r"argument --out: cannot write .*runs\.jsonl .*symbolic link"):
        Store(folder, {})


@pytest.mark.parametrize("name", ["logs", "plots"])
def test_a_study_does_not_write_behind_a_link_within_its_folder(folder, tmp_path, capsys, name):
    (folder / name).symlink_to(tmp_path)
    with pytest.raises(SystemExit):
        main(["study", "--workers", "1", "--batch", "8", "--out", str(folder)])
    assert re.search(rf"argument --out: cannot write to .*/{name} \(a symbolic link", capsys.readouterr().err)


def test_the_log_of_a_run_takes_the_place_of_a_link(folder, victim):
    log = folder / "log.txt"
    log.symlink_to(victim)
    with fresh(log) as file:
        file.write("a line")
    assert log.read_text() == "a line"


def test_the_result_of_a_benchmark_takes_the_place_of_a_link(folder, victim, monkeypatch):
    out = folder / "result.json"
    made = bench_settings(build_parser().parse_args(["bench", "--out", str(out)]))
    out.symlink_to(victim)  # after the check
    monkeypatch.setattr(bench_run, "launch", lambda *_, **__: [bench_run.measure.Measurements()])
    assert bench_run.run(made) == 0
    assert json.loads(out.read_text())["cases"] == {"gpt:fp32": {}}


def test_the_plot_beside_a_trace_takes_the_place_of_a_link(folder, victim, monkeypatch):
    (folder / "trace-norms.png").symlink_to(victim)
    monkeypatch.setattr(train_run.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train_run, "draw", lambda records, path, unit: path.write_text("a plot"))
    task, record = SimpleNamespace(unit="images"), SimpleNamespace(grad_norms={}, noise_scale=None)
    train_run.plot(task, [record], folder / "trace.json", SimpleNamespace(norms=lambda *_: None))
    assert (folder / "trace-norms.png").read_text() == "a plot"
