"""Windows of a sharded model: `attach` over FSDP2 against both ways of plain torch, in bytes and in time.

    python benchmarks/bench_sharded.py --world 4 --save               # bytes, over unshaped links
    python benchmarks/bench_sharded.py --world 2 --rate 1000 --save   # at 1 Gbit/s

Every rank is alone in a network namespace, joined to the others by a switch in one of its own (needs root and
iproute2), so the interface counts what the rank sends. The model is the GPT of `bench_step.py`, each block a
unit; bf16 parameters, fp32 reduction, 8 micro-batches a window, fused AdamW. Variants take turns in the same
processes, window by window; a window's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import save
from _network import Link, hosts, sent_bytes, wait_for
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pyengine as pe
from pyengine.cli.bench.windows.models import GPT, GPT_CONTEXT, GPT_VOCABULARY
from pyengine.cli.machine import card

ACCUMULATE = 8
STOCK = ("stock", "stock, gradient sync in the last")
OURS: dict[str, dict[str, Any]] = {
    "attach, defer='none'": {"defer": "none"},
    "attach": {},
    "attach, defer_budget_mb=math.inf": {"defer_budget_mb": math.inf},
}


class Variant:
    """A model, and one way to train it.

    Args:
        name: of `STOCK` or `OURS`.
        micro_batches: of this rank, int64 `[1, context + 1]` each.
    """

    def __init__(self, name: str, micro_batches: list[torch.Tensor]) -> None:
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model: Any = GPT()
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._data, self._name = micro_batches, name
        self.num_params = sum(math.prod(param.shape) for param in self.model.parameters())
        if name in OURS:
            self._sync = pe.attach(self.model, accumulate=ACCUMULATE, **OURS[name])
            self._sync.on_step(self._note)
            self.held_bytes = 0
        self.run: Callable[[], float] = self._ours if name in OURS else self._stock

    def _note(self, record: pe.StepRecord) -> None:
        self.held_bytes = record.held_bytes

    def _stock(self) -> float:
        for index, tokens in enumerate(self._data):
            if self._name == STOCK[1]:
                self.model.set_requires_gradient_sync(index == ACCUMULATE - 1)
            (self.model(tokens) / ACCUMULATE).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor())

    def _ours(self) -> float:
        norm = torch.zeros(())
        for window in self._sync.windows(self._data):
            for tokens in window:
                self._sync.backward(self.model(tokens))
            norm = self._sync.clip_grad_norm_(1.0)
            self._sync.step(self.optimizer)
        return float(norm)


def main() -> None:
    """Run all variants, print a table, write a result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--rate", type=int, default=0, help="Mbit/s of every rank's link; 0 is unshaped")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-sharded-*.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _worker(options)
        return
    rows = _launch(options)
    _print(rows)
    if options.save:
        network = f"{options.rate} Mbit/s" if options.rate else "unshaped veth"
        machine = card(1) | {"ranks": options.world, "network": network}
        name = f"sharded-{options.world}" + (f"-{options.rate}" if options.rate else "")
        print("wrote", save(name, {"machine": machine, "options": vars(options), "rows": rows}))


def _launch(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    own = [sys.executable, __file__, "--world", str(options.world), "--rounds", str(options.rounds)]
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, hosts(options.world, Link(options.rate)) as made:
        command = [*own, "--out", folder, "--rank"]
        wait_for([host.start([*command, str(rank)], quiet) for rank, host in enumerate(made)], "the model")
        return json.loads((Path(folder) / "0.json").read_text())


def _worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world = options.rank, options.world
    dist.init_process_group("gloo", rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(rank)
    data = list(torch.randint(GPT_VOCABULARY, (ACCUMULATE, 1, GPT_CONTEXT + 1), generator=generator))
    variants = {name: Variant(name, data) for name in (*STOCK, *OURS)}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):
        norms = {}
        for name, variant in variants.items():
            dist.barrier()
            start, before = time.perf_counter(), sent_bytes()
            norms[name] = variant.run()
            numbers = torch.tensor([time.perf_counter() - start, sent_bytes() - before], dtype=torch.float64)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            if number:  # the first one warms up
                measured[name].append(tuple(numbers.tolist()))
        if rank == 0:
            print(f"\rround {number + 1}/{options.rounds + 1}", end="", file=sys.stderr, flush=True)
        first = norms[STOCK[0]]
        assert all(abs(norm - first) < 0.04 * first for norm in norms.values()), norms
    if rank == 0:
        rows = {name: _row(found, variants[name], world) for name, found in measured.items()}
        (Path(options.out) / "0.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _row(found: list[tuple[float, float]], variant: Variant, world: int) -> dict[str, float]:
    """Return median seconds and bytes sent of a window, and these over one gather and one reduction."""
    sent = statistics.median(nbytes for _, nbytes in found)
    least = variant.num_params * (2 + 4) * (world - 1) / world
    return {
        "seconds": statistics.median(seconds for seconds, _ in found),
        "min_seconds": min(seconds for seconds, _ in found),
        "sent_mb": sent / 1e6,
        "times_least": sent / least,
        "held_mb": getattr(variant, "held_bytes", 0) / 1e6,
    }


def _print(rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':36s}{'window':>9s}{'sent':>11s}{'x least':>9s}{'held':>9s}")
    for name, row in rows.items():
        print(
            f"{name:36s}{row['seconds']:7.2f} s{row['sent_mb']:8.0f} MB{row['times_least']:9.2f}"
            f"{row['held_mb']:6.0f} MB"
        )


if __name__ == "__main__":
    main()
