"""Measure how each wire affects training, by the losses of the models of `train` with several seeds.

    python benchmarks/bench_convergence.py --save        # GPT and CNN, 500 steps, three seeds, every wire
    python benchmarks/bench_convergence.py --save --go-on benchmarks/results/<date>-convergence.json  # resume
    make numbers                                         # draws docs/convergence.svg from the newest file

There are two gloo workers. Runs of one model and seed differ only in the wire; the initial parameters and the
micro-batches are the same. The script reports for each wire the loss on data that training never reads (for
the CNN, the share of wrong digits) and its difference from that of fp32 with the same seed. The noise of this
difference is the spread of fp32 over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import save

import pyengine as pe
from pyengine.cli.machine import card
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.comm.launching import launch
from pyengine.wire.named import WIRES

ACCUMULATE, MICRO_BATCH, SMOOTH = 2, 4, 20
TASKS: dict[str, Any] = {"gpt": TextTask, "cnn": DigitsTask}
DEFAULT = (
    *("fp32", "bf16", "bf16-sum-fp32", "fp16", "fp16-sum-fp32", "int8", "int8-ef"),
    *("fp8-e4m3", "fp8-e4m3-ef", "fp8-e5m2", "fp8-e5m2-ef"),
)


def train(model: str, wire: str, seed: int, steps: int) -> tuple[list[float], float]:
    """Train on this worker; return the loss of every step, and the final loss on held-out data."""
    torch.set_num_threads(1)
    task = TASKS[model]()
    torch.manual_seed(seed)
    network = task.build()
    sync = pe.GradSync(network, accumulate=ACCUMULATE, wire=WIRES[wire])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    sync.on_step(lambda record: losses.append(record.loss or 0.0))
    batches = task.batches(
        rank=dist.get_rank(), world_size=dist.get_world_size(), micro_batch=MICRO_BATCH, seed=seed
    )
    for window in sync.windows(batches):
        for batch in window:
            loss, count = task.loss(network, batch)
            sync.backward(loss, count=count)
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        if len(losses) == steps:
            break
    network.eval()
    quality = task.quality(network)
    return losses, quality.get("held_out_loss", 1 - quality["accuracy"])


def main() -> None:
    """Run all models and wires, print a table per model, and write a result file if requested."""
    options = _options()
    models: dict[str, Any] = json.loads(options.go_on.read_text())["models"] if options.go_on else {}
    for model in options.models:
        found = models.setdefault(model, {})
        for wire in (wire for wire in options.wires if wire not in found):
            found[wire] = _measure(model, wire, options)
            if options.save:  # after each wire, so that a stopped run keeps its results
                told = {**vars(options), "go_on": None}
                save("convergence", {"machine": card(1), "options": told, "models": models})
        _print(model, found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=lambda text: text.split(","), default=list(TASKS), help="gpt,cnn")
    add("--wires", type=lambda text: text.split(","), default=list(DEFAULT), help=f"of {', '.join(WIRES)}")
    add("--steps", type=int, default=500)
    add("--seeds", type=int, default=3)
    add("--save", action="store_true", help="write benchmarks/results/<date>-convergence.json")
    add("--go-on", type=Path, help="a result file: keep its runs, and add those that are missing")
    return parser.parse_args()


def _measure(model: str, wire: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the loss curve and the final loss of every seed."""
    curves, finals = [], []
    for seed in range(options.seeds):
        print(f"\r{model}, {wire}, seed {seed}{'':30}", end="", file=sys.stderr, flush=True)
        losses, final = launch(train, workers=2, args=(model, wire, seed, options.steps))[0]
        curves.append([round(statistics.mean(part), 4) for part in _cut(losses)])
        finals.append(final)
    return {"curves": curves, "finals": finals}


def _cut(losses: Sequence[float]) -> list[Sequence[float]]:
    return [losses[start : start + SMOOTH] for start in range(0, len(losses), SMOOTH)]


def _print(model: str, wires: dict[str, dict[str, Any]]) -> None:
    first = wires.get("fp32", next(iter(wires.values())))["finals"]
    print(f"\r{model:30}{'held out':>10}{'lowest':>10}{'highest':>10}{'over fp32':>11}{'at most':>10}")
    for wire, row in wires.items():
        finals = row["finals"]
        over = [mine - theirs for mine, theirs in zip(finals, first, strict=True)]
        numbers = (statistics.mean(finals), min(finals), max(finals), statistics.mean(over), max(over))
        print(f"{wire:30}" + "".join(f"{number:10.4f}" for number in numbers))


if __name__ == "__main__":
    main()
