"""Time whole windows of several variants, which take turns in the same processes.

An event that slows the machine down therefore slows all variants down. The time of a window is the time of
the slowest rank. A variant that fails is left out from then on, and its row states the reason.
"""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pyengine.cli.bench.device import DEVICES, Processor
from pyengine.cli.bench.models import MICRO_BATCHES, build
from pyengine.cli.bench.variants import VARIANTS, Variant, by_phase

# fp16: float32 parameters under autocast, because a `GradScaler` cannot unscale float16 gradients.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 2  # Rounds in which DDP rebuilds its buckets and optimizers create their state.
# A bf16 sum of eight terms rounds eight times by up to 2^-8 of the partial sum. Communication in bf16 rounds
# once more, so that the error is at most 3.5 %.
_AGREEMENT = 0.04
# If only one rank fails, it waits this long before it raises its error, because the other ranks wait in a
# collective.
_TIMEOUT = timedelta(seconds=60)
_ELSEWHERE = "it failed on another rank"

_Found = TypeVar("_Found")
# For each variant, the seconds of every phase of every window.
Times = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Setting:
    """The settings of a measurement: train `model` in `dtype`, with `micro_batches` per window."""

    model: str
    dtype: str
    variants: tuple[str, ...]
    rounds: int
    device: str = "cpu"
    micro_batches: int = MICRO_BATCHES

    @property
    def name(self) -> str:
        usual = self.micro_batches == MICRO_BATCHES
        return f"{self.model}:{self.dtype}" + ("" if usual else f":{self.micro_batches}")

    def make(self, variant: str, device: Processor) -> Variant:
        """Build a variant with its own model on this rank."""
        model, micro_batches = build(
            self.model,
            DTYPES[self.dtype],
            dist.get_rank(),
            micro_batches=self.micro_batches,
            device=device.device,
        )
        return VARIANTS[variant](model, micro_batches, "fused")


@dataclass
class Measurements:
    """The times that a rank has measured, and the reasons why variants were left out."""

    times: Times = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure(setting: Setting, on_round: Callable[[int], None]) -> Measurements:
    """Time the variants on this rank, with one thread; pass the number of finished rounds to `on_round`.

    The default process group must exist, and every rank must call this function.
    """
    device, outcome = DEVICES[setting.device](), Measurements()
    variants: dict[str, Variant] = {}

    def leave_out(name: str, why: str) -> None:
        outcome.failed[name] = why
        variants.pop(name, None)
        outcome.times.pop(name, None)
        gc.collect()

    with device.entered():
        flags = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        for name in setting.variants:
            variant, why = _try(partial(setting.make, name, device), flags)
            torch.set_num_threads(1)  # Accelerate sets a larger number
            if variant is None:
                leave_out(name, why)
            else:
                variants[name], outcome.times[name] = variant, []
            variant = None  # so that the memory of a variant is freed if it is left out later
        for done in range(setting.rounds + WARM_UP):
            names = list(variants)
            if not names:
                raise RuntimeError(f"no variant could be measured: {outcome.failed}")
            turn = done % len(names)  # rotate the order, so that each variant follows different variants
            for name in names[turn:] + names[:turn]:
                taken, why = _try(partial(_window, variants[name], device), flags)
                if taken is None:
                    leave_out(name, why)
                elif done >= WARM_UP:
                    outcome.times[name].append(taken)
            if done == WARM_UP - 1:  # by now, a loss scale that was too large has been reduced
                for name, why in odd_ones(variants, flags).items():
                    leave_out(name, why)
            on_round(done + 1)
    return outcome


def _window(variant: Variant, device: Processor) -> dict[str, float]:
    device.synchronize()
    marks = variant.marks(device.now)
    device.synchronize()
    return by_phase(marks, device.seconds)


def _try(run: Callable[[], _Found], flags: dist.ProcessGroup) -> tuple[_Found | None, str]:
    """Call `run` on every rank; return the result, or None and the reason if any rank has failed.

    Raises:
        Exception: the error that `run` raised, if only this rank failed and other ranks wait in a
            collective.
    """
    failure: Exception | None = None
    found = None
    try:
        found = run()
    except Exception as error:  # noqa: BLE001 - the variant's row states the reason, whatever it is
        traceback.print_exc()
        failure = error.with_traceback(None)  # the frames hold references to the variant's memory
    number = torch.tensor([int(failure is not None)])
    try:
        dist.all_reduce(number, group=flags)
    except RuntimeError:
        raise failure or RuntimeError("another rank has failed without reporting why") from None
    if not number:
        return found, ""
    return None, f"{type(failure).__name__}: {failure}" if failure else _ELSEWHERE


def odd_ones(variants: Mapping[str, Variant], group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the variants whose gradient norm differs from the majority, with a message for each.

    The result is the same on every rank. A variant that does not produce the full gradient of a window on
    every rank is not compared.

    Raises:
        RuntimeError: no majority of variants agrees on a norm.
    """
    norms = {
        name: float(variant.grad_norm)
        for name, variant in variants.items()
        if variant.is_synced and variant.is_whole
    }
    if not norms:
        return {}
    low, high = torch.tensor(list(norms.values())), torch.tensor(list(norms.values()))
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    # The sort puts nan last. `low` is the same on all ranks, and so is `high`.
    usual = float(high.sort().values[(len(norms) - 1) // 2])
    is_odd = [
        not max(abs(a - usual), abs(b - usual)) <= _AGREEMENT * usual
        for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
    text = (
        "variants find different gradients for the same window, so comparing their times is meaningless; "
        f"norms on rank {dist.get_rank()}: {norms}. Leave out the variant that differs"
    )
    if 2 * sum(is_odd) >= len(norms):
        raise RuntimeError(text)
    return {name: text for name, odd in zip(norms, is_odd, strict=True) if odd}


def merged(ranks: Sequence[Measurements]) -> Measurements:
    """Merge the measurements of all ranks: the times of the slowest rank, and all failures."""
    failed: dict[str, str] = {}
    for rank in ranks:
        for name, why in rank.failed.items():
            failed[name] = why if failed.get(name, _ELSEWHERE) == _ELSEWHERE else failed[name]
    names = [name for name in ranks[0].times if name not in failed]
    return Measurements(slowest([{name: rank.times[name] for name in names} for rank in ranks]), failed)


def rows(outcome: Measurements) -> dict[str, dict[str, Any]]:
    """Return the rows of a result file by variant: times, or the reason for a failure."""
    found: dict[str, dict[str, Any]] = dict(summary(outcome.times))
    return found | {name: {"failed": why} for name, why in outcome.failed.items()}


def slowest(ranks: Sequence[Times]) -> Times:
    """Return, for each phase of each window, the time of the slowest rank."""
    return {
        name: [
            {phase: max(rank[phase] for rank in window) for phase in window[0]}
            for window in zip(*(times[name] for times in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Return the minimum and median of each phase and, if `floor` was measured, the median ratio to it.

    `floor` is a variant that does not communicate. A ratio compares two windows of the same round, so that
    slow drift of the machine cancels out. `sync` is the forward and backward time in excess of `floor`.
    """
    return {name: _row(rounds, times.get("floor", [])) for name, rounds in times.items()}


def _row(rounds: list[dict[str, float]], floor: list[dict[str, float]]) -> dict[str, float]:
    row = {}
    for phase in rounds[0]:
        values = [window[phase] * 1e3 for window in rounds]
        row[f"{phase}_min_ms"], row[f"{phase}_p50_ms"] = min(values), statistics.median(values)
    if floor:
        pairs = list(zip(rounds, floor, strict=True))
        for phase in ("early", "window"):
            if all(least[phase] > 0 for least in floor):  # a window of one micro-batch has no early phase
                row[f"{phase}_x_floor"] = statistics.median(
                    mine[phase] / least[phase] for mine, least in pairs
                )
        extra = (sum(mine[phase] - least[phase] for phase in ("early", "last")) for mine, least in pairs)
        row["sync_p50_ms"] = statistics.median(extra) * 1e3
    return row
