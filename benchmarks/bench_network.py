"""Whole windows between hosts: what each wire and each peer costs over links of several rates.

    python benchmarks/bench_network.py --save                # two hosts: unshaped, 10, 1 and 0.1 Gbit/s
    python benchmarks/bench_network.py --hosts 4 --rates 1000 --save
    python benchmarks/bench_network.py --rates 1000 --delay 1  # and a millisecond a packet, with netem

Every host is a network namespace behind a link of its own (root, iproute2: `_network.py`), on which torchrun
starts `--ranks` workers of one thread. Variants take turns in the same processes, window by window; a
window's time is the slowest rank's. `sync` is what a variant costs above training without any communication
(`floor`) outside unscale, clip and optimizer; `sent` is what the interface of the busiest host counted, with
all headers. `due` is what the link alone asks for: the bytes that the wire says it sends, by the link's rate,
less the last backward of the floor, behind which they can hide.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import save
from _network import Link, hosts, sent_bytes, wait_for

from pyengine.cli.bench.windows.measure import DTYPES, WARM_UP, Times, odd_ones, slowest, summary
from pyengine.cli.bench.windows.models import build
from pyengine.cli.bench.windows.variants import VARIANTS, Engine
from pyengine.cli.machine import card

DEFAULT = (
    *("floor", "no_sync_view", "no_sync_bf16", "no_sync_fp16", "no_sync_powersgd", "accelerate"),
    *("engine", "engine_bf16", "engine_bf16_sum_fp32", "engine_int8", "engine_int8_ef", "engine_fp8_e4m3_ef"),
    *("engine_exact", "engine_exact_slots", "attach", "attach_int8_ef"),
)


def main() -> None:
    """Measure every rate, print a table each, write a result file."""
    options = _options()
    if options.out:
        _work(options)
        return
    results = {}
    for rate in options.rates:
        link = Link(rate, options.delay)
        print(f"{options.hosts} hosts, {options.ranks} ranks each, {link}")
        results[str(link)] = rows = _measure(link, options)
        _print(rows)
        if options.save:  # now: a run that is stopped keeps what it has
            machine = card(1) | {"hosts": options.hosts, "ranks a host": options.ranks}
            name = options.name or f"network-{options.hosts}" + (
                f"x{options.ranks}" if options.ranks > 1 else ""
            )
            content = {"machine": machine, "options": vars(options), "links": results}
            print("wrote", save(name, content))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--ranks", type=int, default=1, help="workers a host")
    add("--rates", type=_numbers, default=[0, 10000, 1000, 100], help="Mbit/s, comma-separated; 0: unshaped")
    add("--delay", type=float, default=0.0, help="ms that every packet waits (a kernel with netem)")
    add("--case", default="gpt:fp32", help="model:dtype, see bench_step.py")
    add("--variants", default=",".join(DEFAULT), help=f"of {', '.join(VARIANTS)}")
    add("--rounds", type=int, default=6, help="windows of every variant at every rate")
    add("--save", action="store_true", help="write benchmarks/results/<date>-network-<hosts>.json")
    add("--name", help="of that file, in place of network-<hosts>")
    add("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(link: Link, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run all variants over one kind of link; return their rows."""
    own = ["--case", options.case, "--variants", options.variants, "--rounds", str(options.rounds)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(options.hosts)]
    launcher += ["--nproc-per-node", str(options.ranks), "--master-addr", "10.77.0.1", "--node-rank"]
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, hosts(options.hosts, link) as made:
        started = [
            host.start([*launcher, str(index), __file__, *own, "--out", folder], quiet)
            for index, host in enumerate(made)
        ]
        wait_for(started, str(link))
        world = options.hosts * options.ranks
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    rows = summary(slowest([rank["times"] for rank in ranks]))
    for name, row in rows.items():
        row["sent_mb"] = max(rank["sent"][name] for rank in ranks) / 1e6
        row["due_ms"] = _due_ms(ranks[0]["wire_bytes"][name], rows, link, options)
    return rows


def _due_ms(num_bytes: float, rows: dict[str, dict[str, float]], link: Link, options: Any) -> float:
    """Return the least that a link leaves to be waited for; nan where that is not told."""
    if not num_bytes or not link.rate or "floor" not in rows:
        return math.nan
    on_link = 1e3 * options.ranks * num_bytes / (link.rate * 125e3)
    return max(0.0, on_link - rows["floor"]["last_p50_ms"])


def _work(options: argparse.Namespace) -> None:
    """Measure on this rank, which torchrun has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, (model, dtype) = dist.get_rank(), options.case.split(":")
    variants = {
        name: VARIANTS[name](*build(model, DTYPES[dtype], rank), "fused")
        for name in options.variants.split(",")
    }
    times: Times = {name: [] for name in variants}
    sent: dict[str, list[int]] = {name: [] for name in variants}
    names = list(variants)
    for done in range(options.rounds + WARM_UP):
        turn = done % len(names)  # nobody always follows the same neighbour
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            before = sent_bytes()
            taken = variants[name].window()
            dist.barrier()
            if done >= WARM_UP:
                times[name].append(taken)
                sent[name].append(sent_bytes() - before)
        if done == 0 and (odd := odd_ones(variants, None)):
            raise RuntimeError(next(iter(odd.values())))
        if rank == 0:
            print(f"\rround {done + 1}/{options.rounds + WARM_UP}", end="", file=sys.stderr, flush=True)
    told = {
        "times": times,
        "sent": {name: statistics.median(numbers) for name, numbers in sent.items()},
        "wire_bytes": {name: _wire_bytes(variant) for name, variant in variants.items()},
    }
    (Path(options.out) / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _wire_bytes(variant: Any) -> float:
    """Return what the wire says that a rank sends in a window; 0 where no wire of ours can say it."""
    if not isinstance(variant, Engine) or variant.accumulator == "exact":
        return 0
    numel = sum(param.numel() for param in variant.model.parameters())
    return variant.wire.bytes_on_wire(numel, dist.get_world_size())


def _print(rows: dict[str, dict[str, float]]) -> None:
    columns = {"window": "window_p50_ms", "min": "window_min_ms"}
    columns |= {"sync": "sync_p50_ms", "due": "due_ms"}
    print(f"\r{'':20}" + "".join(f"{name + ' ms':>14}" for name in columns) + f"{'sent MB':>14}")
    for name, row in rows.items():
        numbers = [row.get(column, math.nan) for column in columns.values()]
        print(f"{name:20}" + "".join(f"{number:14.1f}" for number in (*numbers, row["sent_mb"])))


if __name__ == "__main__":
    main()
