"""`python -m pyengine plan --link` and `--measure`: rows, the wire to take, files, bad arguments."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pyengine.cli.main import main
from pyengine.cli.plan import calibration, network
from pyengine.cli.plan.calibration import Calibration
from pyengine.cli.plan.model import Work
from pyengine.comm import local_workers

Capture = pytest.CaptureFixture[str]
MODEL = ("--params", "25e6", "--forward-ms", "50", "--backward-ms", "100", "--step-ms", "10")
MEASURED = Calibration(
    machine={"cpu": "of a test"},
    cores=2,
    speeds=calibration.nominal(50e-6),
    work=Work(10**6, forward_s=0.05, backward_s=0.1, step_s=0.01, bucket_bytes=25 * 2**20),
)
# Of infinite speed is only what nobody has measured.
MEASURED = replace(
    MEASURED,
    speeds=replace(
        MEASURED.speeds,
        transports={
            name: replace(each, bytes_s=1e9, cpu_s_per_byte=1e-9)
            for name, each in MEASURED.speeds.transports.items()
        },
    ),
)


def plan(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    """Run the command; return its JSON lines."""
    assert main(["plan", "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_link_and_number_of_hosts_has_a_row_a_wire_and_one_best(capsys: Capture) -> None:
    rows = plan(capsys, "--link", "0.1,1", "--hosts", "2,64", "--wires", "fp32,int8", *MODEL)
    assert [(row["link_gbit_s"], row["hosts"], row["wire"]) for row in rows] == [
        (link, hosts, wire) for link in (0.1, 1) for hosts in (2, 64) for wire in ("fp32", "int8")
    ]
    assert [row["is_best"] for row in rows] == [False, True] * 4


def test_a_network_that_hides_everything_takes_the_lossless_wire(capsys: Capture) -> None:
    rows = plan(capsys, "--link", "1000", "--hosts", "2", "--kernel-gb-s", "1e3", *MODEL)
    assert [(row["wire"], row["accumulate"]) for row in rows if row["is_best"]] == [("fp32", 1)]


def test_the_window_is_of_the_given_or_the_fewest_micro_batches(capsys: Capture) -> None:
    fixed = plan(capsys, "--link", "1", "--hosts", "8", "--accumulate", "4", *MODEL)
    assert all(row["accumulate"] == 4 for row in fixed)
    for row in plan(capsys, "--link", "1", "--hosts", "8", "--share", "0.1", *MODEL):
        exposed_s = row["sync"]["exposed_s"]
        assert exposed_s <= 0.1 * row["window_s"]
        assert row["window_s"] == pytest.approx(row["accumulate"] * 0.15 + exposed_s + 0.01)
        assert row["sync"]["limit"] == "link"


def test_ranks_of_a_host_share_its_link_in_exchanges(capsys: Capture) -> None:
    alone, eight = (
        plan(capsys, "--link", "10", "--hosts", "8", "--ranks-per-host", ranks, "--wires", "int8", *MODEL)[0]
        for ranks in ("1", "8")
    )
    assert (alone["world_size"], eight["world_size"]) == (8, 64)
    assert eight["sync"]["link_s"] > 4 * alone["sync"]["link_s"]


def test_a_calibration_says_what_is_not_given(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    calibration.write(MEASURED, file)
    assert calibration.read(file) == MEASURED
    asked = ("--link", "1", "--hosts", "2", "--wires", "fp32", "--calibration", str(file))
    (row,) = plan(capsys, *asked)
    assert (row["sync"]["bytes_sent"], row["sync"]["processor_s"]) == (4 * 10**6, 0)  # the other core sends
    (row,) = plan(capsys, *asked, "--cores", "1")
    assert row["sync"]["processor_s"] == pytest.approx(4e6 * 1e-9)
    (row,) = plan(capsys, *asked, "--params", "2e6", "--transport-gbit-s", "80", "--latency-us", "1000")
    assert row["sync"]["bytes_sent"] == 8 * 10**6
    assert row["sync"]["transport_s"] == pytest.approx(8e6 / 1e10)
    assert row["sync"]["latency_s"] == pytest.approx(6e-3)  # two steps of two buckets and of the header


def test_a_result_file_of_a_benchmark_serves_as_a_calibration(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"links": {}, "calibration": asdict(MEASURED)}))
    assert calibration.read(file) == MEASURED


def test_measure_writes_what_is_measured_and_calibrates_nothing_else(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "measure", lambda: MEASURED)
    file = tmp_path / "mine.json"
    assert main(["plan", "--measure", str(file)]) == 0
    assert calibration.read(file) == MEASURED
    assert f"wrote {file}: pass it as --calibration" in capsys.readouterr().out


def test_the_table_fits_a_narrow_terminal_and_names_losses(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--link", "0.1,100", "--hosts", "2,4096", "--transport-gbit-s", "1", *MODEL]) == 0
    text = capsys.readouterr().out
    assert "…" not in text and "transport" in text
    assert text.count(" * ") == 4  # one a link and number of hosts
    assert "lossless: fp32\nlossy: bf16, bf16-sum-fp32, int8\nlossy, fed back: int8-ef\n" in text
    assert "25.0 M gradients in 5 buckets, forward 50.0 ms, backward 100 ms, step 10.0 ms" in text
    assert "0.1 Gbit/s" in text and "100 Gbit/s" in text


def test_a_plot_is_written(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    plan(capsys, "--link", "1,10", "--hosts", "2,8", "--accumulate", "4", "--plot", str(file), *MODEL)
    text = file.read_text()
    assert text.startswith("<?xml") and "int8-ef" in text and "10 Gbit/s" in text


BAD = [
    (("--link", "0"), "argument --link: got 0, need a number above 0"),
    (("--link", "1"), "argument --link: need --params and --backward-ms, or --calibration FILE"),
    (("--link", "1", "--params", "1e6"), "argument --link: need --backward-ms, or --calibration FILE"),
    (("--link", "1", "--params", "0.5"), "argument --params: got 0.5, need a number of elements from 1 to"),
    (("--link", "1", "--share", "5"), "argument --share: got 5, need a share above 0 and below 1: 0.05 is"),
    (("--link", "1", "--wires", "int4"), "argument --wires: got int4, need different ones of fp32, bf16"),
    (("--hosts", "2,0"), "argument --hosts: got 0, need a whole number of at least 1"),
    (("--measure", "a", "--link", "1"), "argument --measure: got --link too: measure first, then pass"),
    (("--measure", "no/such.json"), "argument --measure: cannot write no/such.json"),
    (("--link", "1", "--calibration", "no.json"), "argument --calibration: cannot read no.json ("),
    (("--link", "1", "--plot", "a.svg", *MODEL), "argument --plot: need --accumulate N too: windows of"),
    (("--link", "1", "--workers", "8"), "argument --workers: says nothing about a network: leave it out"),
    (("--hosts", "4"), "argument --hosts: got it without --link, which says how fast hosts send: give it"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: " ".join(value[:3]))
def test_a_bad_argument_about_a_network_is_named(
    capsys: Capture, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"cores": 0}, "cores is 0, need a number above 0"),
        ({"speeds": {}}, "KeyError: 'transports'"),
        ({"work": {"numel": 3}}, "TypeError"),
    ],
)
def test_a_damaged_calibration_is_refused_with_its_reason(
    capsys: Capture, tmp_path: Path, damage: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(asdict(MEASURED) | damage))
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--link", "1", "--calibration", str(file)])
    said = capsys.readouterr().err
    assert "holds no calibration" in said and problem in said and "plan --measure FILE" in said


def test_measuring_needs_a_machine_for_two_workers(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(workers: int) -> None:
        raise ValueError(f"workers={workers}: need at most 1")

    monkeypatch.setattr(local_workers, "check_number", refuse)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--measure", "mine.json"])
    assert "workers=2: need at most 1" in capsys.readouterr().err
