"""One rank of a launch; `bench_peers.py` passes the rank in environment variables."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _launches import Launch
from _network import sent_bytes
from _peers import CONTESTANTS
from _work import build_micro_batches, build_model
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pyengine.cli.bench import variants as stock
from pyengine.cli.bench.measure import DTYPES, odd_ones
from pyengine.cli.bench.variants import Variant

LR = 2.0**20  # with it, a parameter after a step of SGD is -LR times its gradient, up to 2^-20
END_LR = 3e-4  # learning rate of AdamW, for the final losses


def main() -> None:
    """Measure the launch, and write the results of this rank."""
    folder = Path(sys.argv[1])
    launch = Launch(**json.loads((folder / "launch.json").read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kinds = {"time": _times, "memory": _memory, "truth": _truth}

    def show(text: str) -> None:
        if rank == 0:
            (folder / "progress").write_text(text)

    rows = kinds[launch.kind](launch, show)
    numels = [param.numel() for param in build_model(launch.model, torch.float32).parameters()]
    about = {"parameters": sum(numels), "tensors": len(numels)}
    (folder / f"{rank}.json").write_text(json.dumps({"about": about, "rows": rows}))
    dist.barrier()
    os._exit(0)  # peers leave threads running that wait for another window


def _build(name: str, launch: Launch, optimizer: str = "fused") -> Variant:
    dtype = DTYPES[launch.dtype]
    micro_batches = build_micro_batches(launch.model, dtype, rank=dist.get_rank(), num=launch.accumulate)
    return CONTESTANTS[name](build_model(launch.model, dtype), micro_batches, optimizer)


# ---- times ----


def _times(launch: Launch, show: Any) -> dict[str, dict[str, Any]]:
    """Time all variants in turn; return the times in ms, and the bytes and collectives per window."""
    built = {}
    for name in launch.variants:
        show(f"making {name}")
        built[name] = _build(name, launch)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in built}
    sent: dict[str, list[float]] = {name: [] for name in built}
    names = list(built)
    for done in range(launch.rounds + launch.warm_up):
        turn = done % len(names)  # so that no variant always follows the same variant
        for name in names[turn:] + names[:turn]:
            show(f"round {done + 1}/{launch.rounds + launch.warm_up}, {name}")
            dist.barrier()
            before = _sent(launch)
            taken = built[name].window()
            taken["sync"] = taken["early"] + taken["last"]  # per rank: the slowest rank differs by phase
            dist.barrier()
            if done >= launch.warm_up:
                times[name].append(taken)
                sent[name].append(_sent(launch) - before)
        if done == 0 and (odd := odd_ones(built, None)):
            raise RuntimeError(next(iter(odd.values())))
    rows: dict[str, dict[str, Any]] = {}
    for name, variant in built.items():
        phases = {phase: [round(1e3 * one[phase], 2) for one in times[name]] for phase in times[name][0]}
        known = {phase: values for phase, values in phases.items() if not math.isnan(values[0])}
        rows[name] = {"times": known}
        if launch.is_counted:
            show(f"collectives of {name}")
            rows[name] |= _collectives(variant)
        if not math.isnan(sent[name][0]):
            rows[name]["sent_mb"] = statistics.median(sent[name]) / 1e6
    return rows


def _sent(launch: Launch) -> float:
    """Return the bytes that a rank has sent; on loopback, an equal share of the bytes of all ranks."""
    if "PYENGINE_BENCH_ALONE" not in os.environ and not launch.rate:
        return math.nan
    return sent_bytes() if launch.rate else sent_bytes("lo") / launch.world


def _collectives(variant: Variant) -> dict[str, int]:
    """Return how many operations the process group runs in an additional window."""
    threads = _ExperimentalConfig(profile_all_threads=True)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as seen:
        variant.window()
    events: Any = seen.profiler
    calls = [name for event in events.kineto_results.events() if (name := event.name()).startswith("c10d::")]
    single = sum(name.startswith(("c10d::send", "c10d::recv")) for name in calls)
    return {"collectives": len(calls) - single, "point_to_point": single}


# ---- memory ----


def _memory(launch: Launch, show: Any) -> dict[str, dict[str, Any]]:
    """Return the variant's peak memory, minus the memory of the process before the model was created."""
    (name,) = launch.variants
    show(name)
    needs = CONTESTANTS[name].needs
    if needs:
        import_module(needs)
    before = _resident_mb()
    variant = _build(name, launch)
    for _ in range(3):
        variant.window()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: {"peak_mb": round(peak_mb - before, 1)}}


def _resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


# ---- gradients and losses ----


def _truth(launch: Launch, show: Any) -> dict[str, dict[str, Any]]:
    """Return the error of every variant's gradient compared with float64, and the variant's final loss."""
    stock.MAX_NORM = 1e9  # so that no gradient is clipped
    truth = _float64_gradient(launch)
    rows = {}
    for name in launch.variants:
        show(name)
        rows[name] = {"end_loss": _end_loss(_build(name, launch), launch)}
        if CONTESTANTS[name].is_synced:
            rows[name]["error"] = _error(_build(name, launch, "sgd"), truth)
    return rows


def _float64_gradient(launch: Launch) -> list[torch.Tensor]:
    """Return the mean gradient over the micro-batches of all ranks, in float64.

    For bf16 parameters, it is the mean of bf16 gradients.
    """
    dtype = DTYPES[launch.dtype]
    kind = torch.float64 if dtype == torch.float32 else dtype
    model = build_model(launch.model, kind)
    sums = [torch.zeros_like(param, dtype=torch.float64) for param in model.parameters()]
    for rank in range(launch.world):
        for x in build_micro_batches(launch.model, dtype, rank=rank, num=launch.accumulate):
            model.zero_grad()
            model(x.to(kind) if x.is_floating_point() else x).backward()
            for total, param in zip(sums, model.parameters(), strict=True):
                total += param.grad
    return [total / (launch.world * launch.accumulate) for total in sums]


def _error(variant: Variant, truth: list[torch.Tensor]) -> float:
    """Return the error of the third window's gradient, the first that torch's PowerSGD compresses."""
    _set_lr(variant, 0.0)
    for _ in range(2):
        variant.window()
    before = _whole(variant)
    _set_lr(variant, LR)
    variant.window()
    found = [(old - new) / LR for old, new in zip(before, _whole(variant), strict=True)]
    wrong = sum(float((one - true).square().sum()) for one, true in zip(found, truth, strict=True))
    return math.sqrt(wrong / sum(float(true.square().sum()) for true in truth))


def _set_lr(variant: Variant, lr: float) -> None:
    for group in variant.optimizer.param_groups:
        group["lr"] = lr


def _whole(variant: Variant) -> list[torch.Tensor]:
    """Return copies of the parameters in float64; sharded parameters are gathered."""
    found: list[Any] = [param.detach() for param in variant.model.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).double().clone() for p in found]


def _end_loss(variant: Variant, launch: Launch) -> float:
    _set_lr(variant, END_LR)
    for _ in range(launch.rounds):
        variant.window()
    with torch.no_grad():
        losses = torch.stack([variant.model(x) for x in variant.micro_batches])
    mean = losses.mean()
    dist.all_reduce(mean)
    return round(float(mean) / dist.get_world_size(), 4)


if __name__ == "__main__":
    main()
