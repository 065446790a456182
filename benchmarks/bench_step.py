"""Whole windows (forward, backward, sync, unscale, clip, optimizer) of the engine against its peers, on real
ranks.

    python benchmarks/bench_step.py                         # every case on loopback
    python benchmarks/bench_step.py --cases gpt0:bf16 --rate 1000   # every rank on a host (needs root)
    python benchmarks/bench_step.py --memory                # peak memory, one process a variant
    python benchmarks/bench_step.py --cases gpt:fp32 --variants floor,engine,engine_exact,engine_exact_slots

Two gloo ranks (`--world`) with one thread each. Variants take turns in the same processes, window by window,
so that whatever slows the machine down slows all of them down; a window's time is the slower rank's. Without
--rate and --memory, `python -m pyengine bench step` measures the same; bench_windows.py is for GPUs. `sync`
is what a variant costs above training without any communication (`floor`) outside unscale, clip and
optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from _harness import save
from _megatron import Megatron
from _network import Link, hosts, wait_for

from pyengine.cli.bench.windows.measure import WARM_UP, Outcome, Setting, measure, merged, rows
from pyengine.cli.bench.windows.models import MICRO_BATCHES
from pyengine.cli.bench.windows.variants import PHASES, VARIANTS
from pyengine.cli.machine import card

CASES = ("gpt:fp32", "small:fp32", "gpt0:fp32", "gpt0:bf16", "small0:fp32", "small0:bf16")
DEFAULT = (
    *("floor", "ddp", "no_sync", "no_sync_view", "no_sync_bf16", "accelerate"),
    *("engine", "engine_bf16", "engine_native_bf16", "attach", "attach_bf16"),
)
VARIANTS["megatron"] = Megatron


def main() -> None:
    """Run the cases, print a table each, write one result file."""
    options = _options()
    if options.rank is not None:
        _worker(options)
        return
    machine = card(1) | {
        "ranks": options.world,
        "network": f"{options.rate} Mbit/s" if options.rate else "loopback",
    }
    results: dict[str, object] = {}
    for case in options.cases.split(","):
        found = _memory(case, options) if options.memory else _launch(case, options.variants, options)
        results[case] = found
        _print(case, found, options.memory)
    if options.save:
        kind = "memory" if options.memory and options.name == "step" else options.name
        if options.rate:
            kind += f"-{options.rate}"
        print("wrote", save(kind, {"machine": machine, "options": vars(options), "cases": results}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default=",".join(CASES), help="model:dtype or model:dtype:accumulate, comma-separated"
    )
    parser.add_argument("--variants", default=",".join(DEFAULT))
    parser.add_argument(
        "--optimizer", choices=("fused", "plain"), default="fused", help="AdamW of every variant"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--name", default="step", help="of the result file")
    parser.add_argument(
        "--rate", type=int, default=0, help="Mbit/s of every rank's link, each on a host; 0 is loopback"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-<name>*.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _launch(case: str, variants: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        own = ["--cases", case, "--variants", variants, "--optimizer", options.optimizer]
        own += ["--rounds", str(options.rounds), "--out", folder, "--world", str(options.world)]
        with _started([sys.executable, __file__, *own], options) as ranks:
            wait_for(ranks, case)
        return _merge(
            [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.world)]
        )


@contextmanager
def _started(command: list[str], options: argparse.Namespace) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start every rank, on loopback or on a host of its own."""
    commands = [[*command, "--rank", str(rank)] for rank in range(options.world)]
    quiet = {"PYTHONWARNINGS": "ignore"}
    if options.rate:
        with hosts(options.world, Link(options.rate)) as made:
            yield [host.start(own, quiet) for host, own in zip(made, commands, strict=True)]
        return
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29000 + os.getpid() % 2000)} | quiet
    yield [subprocess.Popen(own, env=os.environ | here) for own in commands]


def _worker(options: argparse.Namespace) -> None:
    world = options.world
    ranks = {"RANK": options.rank, "LOCAL_RANK": options.rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()}  # Accelerate looks for torchrun's
    dist.init_process_group("gloo", rank=options.rank, world_size=world)
    before = _rss()
    model, dtype, *accumulate = options.cases.split(":")
    setting = Setting(
        model,
        dtype,
        tuple(options.variants.split(",")),
        options.rounds,
        options.optimizer,
        micro_batches=int(accumulate[0]) if accumulate else MICRO_BATCHES,
    )
    show = _show if options.rank == 0 else lambda *_: None
    outcome = measure(setting, lambda done: show(setting, done))
    (Path(options.out) / f"{options.rank}.json").write_text(
        json.dumps(asdict(outcome) | {"peak_mb": _rss() - before})
    )
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)


def _show(setting: Setting, done: int) -> None:
    print(f"\r{setting.name} round {done}/{setting.rounds + WARM_UP}", end="", file=sys.stderr, flush=True)


def _rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _merge(ranks: list[dict]) -> dict[str, dict[str, float]]:
    peak_mb = max(rank.pop("peak_mb") for rank in ranks)
    found = rows(merged([Outcome(**rank) for rank in ranks]))
    for row in found.values():  # of the whole process: means something with a single variant only
        row["peak_mb"] = peak_mb
    return found


def _memory(case: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = {}
    for variant in options.variants.split(","):
        found[variant] = {"peak_mb": _launch(case, variant, options)[variant]["peak_mb"]}
    return found


def _print(case: str, found: dict[str, dict[str, float]], memory: bool) -> None:
    print(f"\r{case:40}")
    times = [f"{phase}_{stat}_ms" for phase in ("window", *PHASES) for stat in ("min", "p50")]
    columns = ["peak_mb"] if memory else [*times, "sync_p50_ms", "early_x_floor", "window_x_floor"]
    print(f"{'variant':20}" + "".join(f"{c.removesuffix('_ms'):>14}" for c in columns))
    for variant, row in found.items():
        if "failed" in row:
            print(f"{variant:20}failed: {row['failed']}")
            continue
        print(f"{variant:20}" + "".join(f"{row.get(c, float('nan')):14.2f}" for c in columns))


if __name__ == "__main__":
    main()
