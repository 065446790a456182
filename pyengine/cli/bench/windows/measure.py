"""Whole windows of several variants, which take turns in the same processes, window by window.

So a change of the machine's mood hits all of them. A window's time is the slowest rank's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pyengine.cli.bench.windows.models import build
from pyengine.cli.bench.windows.variants import VARIANTS, Variant

PHASES = ("window", "early", "last", "epilogue", "optimizer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 2  # DDP rebuilds its buckets, optimizers make their state
# Sums of eight in bf16 round eight times by 2^-8 of the sum so far at most, a bf16 wire once more: 3.5 %.
_AGREEMENT = 0.04

# Seconds by phase of every window, by variant.
Times = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Setting:
    """What to measure."""

    model: str
    dtype: str
    variants: tuple[str, ...]
    rounds: int
    optimizer: str = "fused"

    @property
    def name(self) -> str:
        return f"{self.model}:{self.dtype}"


def measure(setting: Setting, on_round: Callable[[int], None]) -> Times:
    """Measure on this rank of a process group, with one thread.

    Args:
        on_round: hears how many rounds are done, warm-up included.

    Raises:
        RuntimeError: the variants' gradients differ.
    """
    torch.set_num_threads(1)
    variants = {}
    for name in setting.variants:
        model, micro_batches = build(setting.model, DTYPES[setting.dtype], dist.get_rank())
        variants[name] = VARIANTS[name](model, micro_batches, setting.optimizer)
    times: Times = {name: [] for name in variants}
    names = list(variants)
    for done in range(setting.rounds + WARM_UP):
        turn = done % len(names)  # nobody always follows the same neighbour
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            taken = variants[name].window()
            if done >= WARM_UP:
                times[name].append(taken)
        if done == 0:
            check_agreement(variants)
        on_round(done + 1)
    return times


def check_agreement(variants: Mapping[str, Variant]) -> None:
    """Raise on every rank unless all ranks of all variants that sync, and not in parts over several windows,
    have found the same norm, but for rounding.
    """
    told = {name: variant for name, variant in variants.items() if variant.is_synced and variant.is_whole}
    norms = {name: float(variant.grad_norm) for name, variant in told.items()}
    if not norms:
        return
    low, high = torch.tensor(list(norms.values())), torch.tensor(list(norms.values()))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not high.max() - low.min() <= _AGREEMENT * high.max():  # also when one is nan
        raise RuntimeError(
            "variants find different gradients for the same window, so their times would mean nothing; "
            f"norms on rank {dist.get_rank()}: {norms}. Leave the odd one out"
        )


def slowest(ranks: Sequence[Times]) -> Times:
    """Take every phase of every window from the rank that needed longest for it."""
    return {
        name: [
            {phase: max(rank[phase] for rank in window) for phase in window[0]}
            for window in zip(*(times[name] for times in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Return minimum and median by phase, and against the floor, where it ran, the median of the ratios.

    A ratio compares two windows of the same round, so slow drift of the machine drops out. `sync` is what a
    variant costs above training without any communication outside unscale, clip and optimizer.
    """
    return {name: _row(rounds, times.get("floor")) for name, rounds in times.items()}


def _row(rounds: list[dict[str, float]], floor: list[dict[str, float]] | None) -> dict[str, float]:
    row = {}
    for phase in rounds[0]:
        values = [window[phase] * 1e3 for window in rounds]
        row[f"{phase}_min_ms"], row[f"{phase}_p50_ms"] = min(values), statistics.median(values)
    if floor is not None:
        for phase in ("early", "window"):
            ratios = [mine[phase] / theirs[phase] for mine, theirs in zip(rounds, floor, strict=True)]
            row[f"{phase}_x_floor"] = statistics.median(ratios)
        extra = [
            sum(mine[p] - theirs[p] for p in ("early", "last")) * 1e3
            for mine, theirs in zip(rounds, floor, strict=True)
        ]
        row["sync_p50_ms"] = statistics.median(extra)
    return row
