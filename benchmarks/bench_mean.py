"""Measure how far a loop's gradient is from the mean over all tokens, and how many bytes each wire sends.

    python benchmarks/bench_mean.py --save     # takes seconds; writes benchmarks/results/<date>-mean.json
    make numbers                               # draws docs/mean.svg from the file

Two gloo ranks train the GPT of `bench_peers.py` with the DDP loop of the README (`no_sync`, losses divided by
`accumulate`) and with `GradSync`. The error is the relative L2 distance between the last window's gradient
and the mean over all tokens of all ranks, which is computed in float64. Bytes are those that a rank sends for
a window of 8 micro-batches. For `GradSync` they are `StepRecord.bytes_on_wire`; for DDP they are counted from
the buckets that it reduces. No result depends on the speed of the machine.
"""

import argparse
import json
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _harness import save
from _work import WIDTHS, build_model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.cli.machine import card
from pyengine.cli.tasks.gpt import Shape
from pyengine.wire.named import WireName

WORLD, ACCUMULATE = 2, 8
LONGEST = Shape.context
# The number of micro-batches per rank, and the minimum number of tokens per micro-batch, by case. The last
# window of `short` has 4 micro-batches.
CASES = {
    "full": (ACCUMULATE, LONGEST),
    "short": (ACCUMULATE + ACCUMULATE // 2, LONGEST),
    "tokens": (ACCUMULATE, LONGEST // 4),
}
WIRES: tuple[WireName, ...] = ("fp32", "bf16", "int8-ef")

Gradient = list[Tensor]


def main() -> None:
    """Run every case and wire, print the results, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WIDTHS, default="gpt")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-mean.json")
    options = parser.parse_args()
    found = pe.launch(measure, workers=WORLD, args=(options.model,))[0]
    print(json.dumps(found))
    if options.save:
        about = {"model": options.model, "ranks": WORLD, "accumulate": ACCUMULATE, "longest": LONGEST}
        print("wrote", save("mean", {"machine": card(1), "about": about, **found}))


def measure(name: str) -> dict[str, Any]:
    """Return errors by case and loop, and bytes by loop."""
    torch.set_num_threads(1)
    errors, tokens = {}, {}
    for case in CASES:
        truth = true_mean(name, case)
        tokens[case] = [
            [x.shape[1] - 1 for x in _last_window(micro_batches(case, rank))] for rank in range(WORLD)
        ]
        loader = micro_batches(case, dist.get_rank())
        errors[case] = {
            "ddp": _error(_ddp(name, loader)[0], truth),
            "engine": _error(_engine(name, loader)[0], truth),
        }
    loader = micro_batches("full", dist.get_rank())
    sent = {"ddp": _ddp(name, loader, no_sync=False)[1], "no_sync": _ddp(name, loader)[1]}
    sent |= {wire: _engine(name, loader, wire)[1] for wire in WIRES}
    return {"errors": errors, "tokens": tokens, "bytes": sent}


def micro_batches(case: str, rank: int) -> list[Tensor]:
    """Return a rank's micro-batches of random tokens, each with shape `[1, tokens + 1]`."""
    num, fewest = CASES[case]
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(fewest, LONGEST + 1, (num,), generator=generator).tolist()
    return [torch.randint(Shape.vocabulary, (1, length + 1), generator=generator) for length in lengths]


def true_mean(name: str, case: str) -> Gradient:
    """Return the gradient of the mean loss over all tokens of the last window, computed in float64."""
    model = build_model(name, torch.float64)
    last = [x for rank in range(WORLD) for x in _last_window(micro_batches(case, rank))]
    tokens = sum(x.shape[1] - 1 for x in last)
    for x in last:
        (model(x) * ((x.shape[1] - 1) / tokens)).backward()
    return _gradient(model)


def _last_window(loader: list[Tensor]) -> list[Tensor]:
    return loader[(len(loader) - 1) // ACCUMULATE * ACCUMULATE :]


def _gradient(model: nn.Module) -> Gradient:
    return [param.grad.double().clone() for param in model.parameters() if param.grad is not None]


def _error(found: Gradient, truth: Gradient) -> float:
    wrong = sum(float((one - true).square().sum()) for one, true in zip(found, truth, strict=True))
    error = math.sqrt(wrong / sum(float(true.square().sum()) for true in truth))
    return float(f"{error:.2g}")  # further digits differ between processors


# ---- loops ----


def _ddp(name: str, loader: list[Tensor], *, no_sync: bool = True) -> tuple[Gradient, int]:
    """Return the last window's gradient of the README's DDP loop, and the bytes that this rank sent."""
    model = build_model(name, torch.float32)
    ddp_model = DistributedDataParallel(model)
    sent = 0

    def count(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal sent
        sent += pe.wire.FP32().bytes_on_wire(bucket.buffer().numel(), WORLD)
        return allreduce_hook(group, bucket)

    ddp_model.register_comm_hook(dist.group.WORLD, count)
    for index, x in enumerate(loader, start=1):
        if (index - 1) % ACCUMULATE == 0:
            model.zero_grad()
            sent = 0
        last = index % ACCUMULATE == 0 or index == len(loader)
        with ddp_model.no_sync() if no_sync and not last else nullcontext():
            (ddp_model(x) / ACCUMULATE).backward()
    return _gradient(model), sent


def _engine(name: str, loader: list[Tensor], wire: WireName = "fp32") -> tuple[Gradient, int]:
    """Return the last window's gradient of the README's `GradSync` loop, and the bytes in its record."""
    model = build_model(name, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = pe.GradSync(model, accumulate=ACCUMULATE, wire=wire)
    found: Gradient = []
    for window in sync.windows(loader):
        for x in window:
            tokens = x.shape[1] - 1
            sync.backward(model(x) * tokens, count=tokens)
        found = _gradient(model)
        sync.step(optimizer)
    assert sync.last_record is not None
    return found, sync.last_record.bytes_on_wire


if __name__ == "__main__":
    main()
