"""Results on disk: no complete result is lost, a torn line is dropped, and studies do not mix."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import asdict
from pathlib import Path

import pytest
from study_records import ended, made

from pyengine.cli.arguments import Conflict
from pyengine.cli.study.store import Record, Store

SHARED = {"subject": "cnn", "dataset_size": 100, "machine": {"cpu": "some", "cores": 4}}


def kept(folder: Path) -> dict[tuple[int, int, int], Record]:
    store = Store(folder, SHARED)
    store.close()
    return store.records


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a study with two runs."""
    store = Store(tmp_path / "study", SHARED)
    store.add(made(1, 64))
    store.add(ended(2, 64))
    store.close()
    return tmp_path / "study"


def test_runs_come_back_as_they_were(folder):
    assert kept(folder) == {(1, 64, 0): made(1, 64), (2, 64, 0): ended(2, 64)}


@pytest.mark.parametrize(
    "values", [{"noise_scale": 24.5, "noise_spread": 4.0}, {"accuracy": [(0, None), (8, 0.5)]}], ids=str
)
def test_values_that_may_be_missing_come_back(folder, values):
    store = Store(folder, SHARED)
    record = made(8, 64, **values)
    store.add(record)
    store.close()
    assert kept(folder)[8, 64, 0] == record


def test_every_line_is_an_object(folder):
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["study", "run", "run"]
    assert {name: lines[0][name] for name in SHARED} == SHARED


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_torn_last_line_is_dropped_and_the_next_one_is_whole(folder, lost):
    path = folder / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    store = Store(folder, SHARED)
    assert list(store.records) == [(1, 64, 0)]
    store.add(made(4, 64))
    store.close()
    assert list(kept(folder)) == [(1, 64, 0), (4, 64, 0)]


def test_torn_first_line_begins_anew(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"event": "stu')
    assert kept(tmp_path) == {}
    assert json.loads((tmp_path / "runs.jsonl").read_text())["event"] == "study"


def test_run_that_was_tried_again_counts_as_the_last_time(folder):
    store = Store(folder, SHARED)
    store.add(made(2, 64))
    store.close()
    assert kept(folder)[2, 64, 0].is_done


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dataset_size": 200},
            "contains a study with dataset size 100, but this one has 200: use another folder",
        ),
        (
            {"machine": {"cpu": "some", "cores": 8}},
            "with machine cpu some, cores 4, but this one has cpu some, cores 8",
        ),
    ],
    ids=["settings", "machine"],
)
def test_another_study_is_refused(folder, changes, message):
    with pytest.raises(Conflict, match=message):
        Store(folder, SHARED | changes)
    assert len(kept(folder)) == 2


def test_folder_that_another_study_writes_to_is_refused(folder):
    store = Store(folder, SHARED)
    with pytest.raises(Conflict, match="another study is writing there"):
        Store(folder, SHARED)
    store.close()
    assert len(kept(folder)) == 2


def odd(**changes: object) -> str:
    """Return a run's line with some of its values changed."""
    line = {"event": "run", **json.loads(json.dumps(asdict(made(1, 64))))}
    return json.dumps({name: value for name, value in (line | changes).items() if value != "missing"})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "a list, not an object"),
        ("", "Expecting value"),
        ("{}", "not a run: see 'accumulate', 'accuracy', 'batch'"),
        (odd(event="study"), "not a run: see 'event'"),
        (odd(seconds="missing"), "not a run: see 'seconds'"),
        (odd(seconds=7), "'seconds' is 7"),
        (odd(accuracy=[1, 2]), r"'accuracy' is \[1, 2\]"),
        (odd(accuracy=[[1, "much"]]), "'accuracy' is "),
        (odd(noise_scale="much"), "'noise_scale' is much"),
        (odd(workers="two"), "'workers' is two"),
        (odd(wall_s=math.nan), "'wall_s' is nan"),
        (odd(cpu_share=[]), "'cpu_share' has 0 entries, expected 1"),
        ("[" * 100000, "nested too deeply"),
        *(
            (odd(**{name: [value]}), rf"'{name}' is \[")
            for name, value in (("seconds", 1e308), ("seconds", 0), ("seconds", -1.0), ("sync_s", 1e308))
        ),
        *(
            (odd(**{name: value}), f"'{name}' is ")
            for name, value in (
                *((name, 10**400) for name in ("wall_s", "busy", "global_batch", "noise_scale")),
                *(("global_batch", 0), ("workers", 2**70), ("busy", -1), ("noise_spread", -1.0)),
                *(("cpu_share", [1e308]), ("peak_rss_bytes", [2**70]), ("accuracy", [[1, 1e308]])),
            )
        ),
    ],
    ids=lambda text: text[:20],
)
def test_a_line_of_odd_shape_is_named(folder, line, reason):
    path = folder / "runs.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(
        Conflict, match=rf"line 4 of its runs\.jsonl cannot be read \({reason}.*delete the line"
    ):
        Store(folder, SHARED)


def test_a_line_that_is_no_text_is_named(folder):
    path = folder / "runs.jsonl"
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x81\n")
    with pytest.raises(Conflict, match=r"line 4 of its runs\.jsonl cannot be read"):
        Store(folder, SHARED)


def test_a_first_line_of_odd_shape_asks_for_another_folder(tmp_path):
    (tmp_path / "runs.jsonl").write_text("[]\n")
    with pytest.raises(Conflict, match=r"line 1 of its runs\.jsonl cannot be read .*: use another folder"):
        Store(tmp_path, SHARED)


@pytest.mark.parametrize("place", ["file", "file/study", "folder"])
def test_a_place_that_no_study_can_be_written_to_is_named(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "runs.jsonl").mkdir(parents=True)
    with pytest.raises(Conflict, match=r"^argument --out: cannot write .*: name a writable folder"):
        Store(tmp_path / place, SHARED)


def test_what_was_measured_stays_when_the_disk_is_full(folder):
    store = Store(folder, SHARED)
    before = store.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (len(before) + 10, limits[1])
    )  # the kernel writes a part, then fails
    try:
        with pytest.raises(OSError, match=r"File too large: .*runs\.jsonl"):
            store.add(made(4, 64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.path.read_bytes() == before
    store.add(made(8, 64))
    store.close()
    assert list(kept(folder)) == [(1, 64, 0), (2, 64, 0), (8, 64, 0)]
