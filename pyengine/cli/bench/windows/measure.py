"""Whole windows of several variants, which take turns in the same processes, window by window.

So a change of the machine's mood hits all of them. A window's time is the slowest rank's. A variant that
fails is left out from there on, and its row says why.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyengine.cli.bench.windows.by_hand import ByHand
from pyengine.cli.bench.windows.device import DEVICES, Processor, count_calls, launches
from pyengine.cli.bench.windows.models import MICRO_BATCHES, build
from pyengine.cli.bench.windows.variants import BY_NAME, VARIANTS, Variant, by_phase

BY_NAME["by_hand"] = VARIANTS["by_hand"] = ByHand  # which is made of what variants.py has

PHASES = ("window", "early", "last", "epilogue", "optimizer")
# fp16: float32 parameters under autocast, since a GradScaler unscales no float16 gradients.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 2  # DDP rebuilds its buckets, optimizers make their state
# Sums of eight in bf16 round eight times by 2^-8 of the sum so far at most, a bf16 wire once more: 3.5 %.
_AGREEMENT = 0.04
# How long ranks wait for one that has failed alone: it cannot know, and ends with its reason.
_PATIENCE = timedelta(seconds=60)
_ELSEWHERE = "it failed on another rank"

# Seconds by phase of every window, by variant.
Times = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        micro_batches: of a window.
    """

    model: str
    dtype: str
    variants: tuple[str, ...]
    rounds: int
    optimizer: str = "fused"
    device: str = "cpu"
    micro_batches: int = MICRO_BATCHES

    @property
    def name(self) -> str:
        usual = self.micro_batches == MICRO_BATCHES
        return f"{self.model}:{self.dtype}" + ("" if usual else f":{self.micro_batches}")

    def make(self, variant: str, device: Processor) -> Variant:
        """Make a variant with a model of its own, on this rank."""
        model, micro_batches = build(
            self.model,
            DTYPES[self.dtype],
            dist.get_rank(),
            micro_batches=self.micro_batches,
            device=device.device,
        )
        return VARIANTS[variant](model, micro_batches, self.optimizer)


@dataclass
class Outcome:
    """What a rank has measured.

    Attributes:
        failed: why, by variant that is left out.
        figures: by variant: `peak_mb`, `launches` and so on, where the device counts them, or
            `not_counted`, why it could not.
    """

    times: Times = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class Contestant:
    """A variant, and what it holds of the device's memory.

    Args:
        make: makes the variant.
    """

    def __init__(self, make: Callable[[], Variant], device: Processor) -> None:
        self._device = device
        before = device.allocated()
        self.variant = make()
        self._held = device.allocated() - before

    def turn(self) -> dict[str, float]:
        """Train; return seconds by phase of a window, and where the host runs ahead, the host's.

        There two windows follow each other: the host's time is that of the first, which finds the device
        idle and so has nothing to wait for; the device's that of the second, which the host has queued behind
        it.
        """
        device, before = self._device, self._device.allocated()
        device.synchronize()
        begin = time.perf_counter()
        marks = self.variant.marks(device.now)
        host = {"host": time.perf_counter() - begin} if device.runs_ahead else {}
        if device.runs_ahead:
            marks = self.variant.marks(device.now)
        device.synchronize()
        self._held += device.allocated() - before
        return by_phase(marks, device.seconds) | host

    def memory(self) -> dict[str, float]:
        """Train on; return the most that a window needs of the device's memory."""
        device = self._device
        held_by_others = device.allocated() - self._held
        device.reset_peak()
        self.turn()
        return {"peak_mb": (device.peak() - held_by_others) / 2**20}

    def calls(self) -> dict[str, int]:
        """Train on; return what the host asks of the device in a window."""
        device = self._device

        def window() -> None:
            self.variant.marks(lambda: None)
            device.synchronize()

        return launches(count_calls(window, device.activities))


class Contest:
    """Variants in turn, on this rank of a process group.

    Args:
        on_round: hears how many rounds are done, warm-up included.
    """

    def __init__(self, setting: Setting, device: Processor, on_round: Callable[[int], None]) -> None:
        self._setting, self._device, self._on_round = setting, device, on_round
        self._flags = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._running: dict[str, Contestant] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Measure.

        Raises:
            RuntimeError: no variant is left, or none can be said to be right.
        """
        outcome = self._outcome
        for name in self._setting.variants:
            if why := self._try(partial(self._enter, name))[1]:
                self._leave_out(name, why)
        outcome.times = {name: [] for name in self._running}
        for done in range(self._setting.rounds + WARM_UP):
            self._round(done)
            if done == WARM_UP - 1:  # by now a loss scale that was too large has come down
                self._leave_out_odd_ones()
            self._on_round(done + 1)
        for name, contestant in self._running.items():
            outcome.figures[name] = self._figures(contestant) if self._device.runs_ahead else {}
        return outcome

    def _enter(self, name: str) -> None:
        self._running[name] = Contestant(lambda: self._setting.make(name, self._device), self._device)
        torch.set_num_threads(1)  # Accelerate takes more

    def _round(self, done: int) -> None:
        names = list(self._running)
        if not names:
            raise RuntimeError(f"no variant could be measured: {self._outcome.failed}")
        turn = done % len(names)  # nobody always follows the same neighbour
        for name in names[turn:] + names[:turn]:
            taken, why = self._try(self._running[name].turn)
            if why:
                self._leave_out(name, why)
            elif done >= WARM_UP:
                self._outcome.times[name].append(taken)

    def _figures(self, contestant: Contestant) -> dict[str, Any]:
        """Count what can be counted: the times are good whatever comes of it."""
        found: dict[str, Any] = {}
        for count in (contestant.memory, contestant.calls):
            counted, why = self._try(count)
            found |= {"not_counted": why} if why else counted
        return found

    def _try(self, run: Callable[[], Any]) -> tuple[Any, str]:
        """Run on every rank, and meet; return what this one has found, and why it has failed somewhere.

        Raises:
            Exception: whatever it is, if it has failed on this rank alone: the others wait in a collective.
        """
        failure: Exception | None = None
        found = None
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 - whatever it is, its row says it
            traceback.print_exc()
            failure = error.with_traceback(None)  # whose frames hold the variant's memory
        number = torch.tensor([int(failure is not None)])
        try:
            dist.all_reduce(number, group=self._flags)
        except RuntimeError:
            raise failure or RuntimeError("another rank has failed, and did not say why") from None
        if not number:
            return found, ""
        return None, f"{type(failure).__name__}: {failure}" if failure else _ELSEWHERE

    def _leave_out(self, name: str, why: str) -> None:
        self._outcome.failed[name] = why
        self._running.pop(name, None)
        self._outcome.times.pop(name, None)
        gc.collect()

    def _leave_out_odd_ones(self) -> None:
        variants = {name: contestant.variant for name, contestant in self._running.items()}
        for name, why in odd_ones(variants, self._flags).items():
            self._leave_out(name, why)


def measure(setting: Setting, on_round: Callable[[int], None]) -> Outcome:
    """Measure on this rank of a process group, with one thread; see `Contest`.

    Args:
        on_round: hears how many rounds are done, warm-up included.

    Raises:
        RuntimeError: the variants' gradients differ, and none can be said to be right; or all have failed.
    """
    device = DEVICES[setting.device]()
    with device.entered():
        return Contest(setting, device, on_round).run()


def check_agreement(variants: Mapping[str, Variant]) -> None:
    """Raise on every rank unless all ranks of all variants that sync, and not in parts over several windows,
    have found the same norm, but for rounding.
    """
    if odd := odd_ones(variants, None):
        raise RuntimeError(next(iter(odd.values())))


def odd_ones(variants: Mapping[str, Variant], group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return, on every rank alike, which variants have found another norm than most, and what to say of them;
    see `check_agreement`.

    Raises:
        RuntimeError: there is no such majority.
    """
    told = {name: variant for name, variant in variants.items() if variant.is_synced and variant.is_whole}
    norms = {name: float(variant.grad_norm) for name, variant in told.items()}
    if not norms:
        return {}
    low, high = torch.tensor(list(norms.values())), torch.tensor(list(norms.values()))
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    # Sorted, so that a nan comes last; low and high are the same on all ranks.
    usual = float(high.sort().values[(len(norms) - 1) // 2])
    is_odd = [
        not max(abs(a - usual), abs(b - usual)) <= _AGREEMENT * usual
        for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
    text = (
        "variants find different gradients for the same window, so their times would mean nothing; "
        f"norms on rank {dist.get_rank()}: {norms}. Leave the odd one out"
    )
    if 2 * sum(is_odd) >= len(norms):
        raise RuntimeError(text)
    return {name: text for name, odd in zip(norms, is_odd, strict=True) if odd}


def merged(ranks: Sequence[Outcome]) -> Outcome:
    """Return what all ranks have found together: the slowest's times, the largest figures."""
    first, failed = ranks[0], dict[str, str]()
    for rank in ranks:
        for name, why in rank.failed.items():
            failed[name] = why if failed.get(name, _ELSEWHERE) == _ELSEWHERE else failed[name]
    names = [name for name in first.times if name not in failed]
    figures = {
        name: {
            key: max(rank.figures[name][key] for rank in ranks if key in rank.figures[name])
            for key in first.figures[name]
        }
        for name in names
    }
    return Outcome(slowest([{name: rank.times[name] for name in names} for rank in ranks]), failed, figures)


def rows(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return the rows of a result file by variant: times and figures, or why there are none."""
    measured = summary(outcome.times)
    found: dict[str, dict[str, Any]] = {
        name: row | outcome.figures.get(name, {}) for name, row in measured.items()
    }
    return found | {name: {"failed": why} for name, why in outcome.failed.items()}


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
            pairs = [(mine[phase], theirs[phase]) for mine, theirs in zip(rounds, floor, strict=True)]
            if all(theirs > 0 for _, theirs in pairs):  # a window of one micro-batch has no early ones
                row[f"{phase}_x_floor"] = statistics.median(mine / theirs for mine, theirs in pairs)
        extra = [
            sum(mine[p] - theirs[p] for p in ("early", "last")) * 1e3
            for mine, theirs in zip(rounds, floor, strict=True)
        ]
        row["sync_p50_ms"] = statistics.median(extra)
    return row
