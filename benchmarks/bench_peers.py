"""Compare whole windows of pyengine with those of its alternatives; `make bench` runs this script.

    python benchmarks/bench_peers.py                # every launch without a result file from today
    python benchmarks/bench_peers.py --short        # a few launches with few rounds; takes minutes
    python benchmarks/bench_peers.py --only base,gbit --again
    python benchmarks/bench_peers.py --list

`_launches.py` lists the launches. In a launch all variants take turns in the same processes, window by
window. The time of a window is that of the slowest rank. The ranks of a loopback launch share a network
namespace that contains nothing else. In a launch with a shaped link, every rank has a separate namespace and
link (`_network.py`). Therefore the interfaces count only the bytes of the ranks. Namespaces need root and
iproute2. Without them, loopback launches do not report bytes, and launches with shaped links are skipped with
a message. Every launch writes `results/<date>-peers-<name>.json` when it ends; `render_numbers.py` renders
these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _harness import RESULTS
from _launches import LAUNCHES, Launch, shortened
from _network import alone, can_make_hosts, hosts
from _peers import CONTESTANTS

from pyengine.cli.machine import card

BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
STALLED_S = 600  # a launch without progress for this long is terminated


def main() -> None:
    """Run the missing launches one by one; exit with 1 if a launch has failed."""
    options = _options()
    wanted = options.only.split(",") if options.only else None
    launches = [launch for launch in options.launches if wanted is None or launch.name in wanted]
    if options.variants:
        chosen = options.variants.split(",")
        kept = [tuple(name for name in one.variants if name in chosen) for one in launches]
        launches = [
            dataclasses.replace(one, variants=names) for one, names in zip(launches, kept, strict=True)
        ]
    if options.rounds:
        launches = [dataclasses.replace(one, rounds=options.rounds, warm_up=1) for one in launches]
    is_root = can_make_hosts()
    options.out.mkdir(parents=True, exist_ok=True)
    failed, start = [], time.monotonic()
    for index, launch in enumerate(launches):
        head = f"[{index + 1}/{len(launches)}, {_clock(time.monotonic() - start)}] {launch.name}"
        path = options.out / f"{datetime.date.today()}-peers-{launch.name}.json"
        if options.list:
            print(f"{launch.name:18}{launch.work}, {launch.network}, {len(launch.variants)} variants")
        elif not options.again and _is_there(path, launch):
            print(f"{head}: {path.name} is there")
        elif launch.rate and not is_root:
            print(f"{head}: left out, a link of {launch.network} needs root and iproute2")
        elif (content := _run(launch, head, is_root)) is None:
            failed.append(launch.name)
        else:
            path.write_text(json.dumps(content) + "\n")
            print(f"\r{head}: {content['seconds']} s{'':40}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; their logs are in {BUILD}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--short", dest="launches", action="store_const", const=shortened(), default=LAUNCHES)
    add("--only", help="names of launches, comma-separated")
    add("--variants", help="variants of the launches to run, comma-separated")
    add("--again", action="store_true", help="also run launches that have a result file of today")
    add("--rounds", type=int, help="rounds of every launch, after one round of warm-up")
    add("--out", type=Path, default=RESULTS, help="folder of the result files")
    add("--list", action="store_true", help="print the launches and stop")
    return parser.parse_args()


def _run(launch: Launch, head: str, is_root: bool) -> dict[str, Any] | None:
    """Run a launch; return the content of its result file, or None if it failed."""
    start = time.monotonic()
    missing = [name for name in launch.variants if not _is_installed(CONTESTANTS[name].needs)]
    here = tuple(name for name in launch.variants if name not in missing)
    sets = [(name,) for name in here] * launch.rounds if launch.kind == "memory" else [here]
    try:
        parts = [_ranks(dataclasses.replace(launch, variants=names), head, is_root) for names in sets]
    except RuntimeError as error:
        print(f"\r{head}: {error}{'':40}")
        return None
    return {
        "machine": card(1) | {"cores": os.cpu_count()},
        "launch": dataclasses.asdict(launch),
        "about": {"work": launch.work, "network": launch.network, **parts[0][0]["about"]},
        "missing": missing,
        "variants": {
            name: {"label": CONTESTANTS[name].label, "is_ours": CONTESTANTS[name].is_ours}
            for name in launch.variants
        },
        "rows": _medians([_merge(part) for part in parts]),
        "seconds": round(time.monotonic() - start),
    }


def _is_there(path: Path, launch: Launch) -> bool:
    """Return whether a file has all variants of this launch and at least as many rounds."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())["launch"]
    return found["rounds"] >= launch.rounds and set(found["variants"]) >= set(launch.variants)


def _is_installed(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


def _ranks(launch: Launch, head: str, is_root: bool) -> list[dict[str, Any]]:
    """Run one set of processes; return the results of every rank.

    Raises:
        RuntimeError: a rank failed, or no rank made progress for `STALLED_S`.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    for lock in BUILD.glob(
        "torch_extensions/**/lock"
    ):  # left by a killed build; all later builds would wait for it
        lock.unlink()
    log = BUILD / f"{launch.name}.log"
    with tempfile.TemporaryDirectory() as name, log.open("wb") as out:
        folder = Path(name)
        (folder / "launch.json").write_text(json.dumps(dataclasses.asdict(launch)))
        worker = str(Path(__file__).with_name("_peers_worker.py"))
        with _started([sys.executable, worker, str(folder)], launch, out, is_root) as ranks:
            _watch(ranks, folder / "progress", head, log)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(launch.world)]


@contextmanager
def _started(
    command: list[str], launch: Launch, out: Any, is_root: bool
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start every rank on loopback or on a separate host; terminate all ranks on exit."""
    shared = {
        "WORLD_SIZE": str(launch.world),
        "LOCAL_WORLD_SIZE": str(launch.world),
        "GROUP_RANK": "0",  # Lightning reads RANK only in processes that torchrun started
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_EXTENSIONS_DIR": str(BUILD / "torch_extensions"),  # where DeepSpeed builds its extensions
    }
    # DeepSpeed's build needs ninja, which is installed in one of the environments.
    programs = [str(Path(entry).parents[2] / "bin") for entry in sys.path if entry.endswith("site-packages")]
    shared["PATH"] = os.pathsep.join([*programs, os.environ["PATH"]])
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(launch.world)]
    ranks: list[subprocess.Popen[bytes]] = []
    with hosts(launch.world, launch.rate) if launch.rate else alone(is_root) as made:
        try:
            for rank, env in enumerate(own):
                ranks.append(made[rank % len(made)].start(command, shared | env, out))
            yield ranks
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _watch(ranks: list[subprocess.Popen[bytes]], progress: Path, head: str, log: Path) -> None:
    """Wait for all ranks, and show their progress."""
    told, moved = "", time.monotonic()
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        now = progress.read_text() if progress.exists() else ""
        if now != told:
            told, moved = now, time.monotonic()
            print(f"\r{head}: {told:40}", end="", flush=True)
        if time.monotonic() - moved > STALLED_S:
            raise RuntimeError(f"nothing moved for {STALLED_S} s, see {log}")
        time.sleep(0.5)
    if any(codes):
        raise RuntimeError(f"a rank failed ({codes}), see {log}")


def _merge(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every variant's row, with the maximum of times, memory and bytes over all ranks."""
    rows: dict[str, dict[str, Any]] = {}
    for name, first in ranks[0]["rows"].items():
        row = rows[name] = dict(first)
        others = [rank["rows"][name] for rank in ranks]
        for phase in first.get("times", ()):
            windows = zip(*(other["times"][phase] for other in others), strict=True)
            row["times"] = row["times"] | {phase: [max(times) for times in windows]}
        for figure in ("peak_mb", "sent_mb"):
            if figure in first:
                row[figure] = max(other[figure] for other in others)
    return rows


def _medians(parts: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return every variant's row; if it has memory peaks, with their median and a list of them."""
    rows = {name: row for part in parts for name, row in part.items()}
    for name, row in rows.items():
        if "peak_mb" in row:
            peaks = [part[name]["peak_mb"] for part in parts if name in part]
            rows[name] = row | {"peak_mb": statistics.median(peaks), "peaks_mb": peaks}
    return rows


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    main()
