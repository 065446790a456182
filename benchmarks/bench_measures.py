"""Measure what a window costs with each measure: python benchmarks/bench_measures.py [--save].

The gradients are there already (`Premade`), so that nearly all of the time is the engine's: 17.4 M parameters
in the 100 tensors of a GPT, and 1000 small ones, in windows of 8 micro-batches. Variants take turns window by
window in the same processes, on two gloo ranks of one thread or, with --device cuda, on one NCCL rank.
`control` is `none` once more: their difference is noise. All clip, and every gradient is above the limit.
`window` is the time of a window that the host launches behind another one, `host` that until it has launched
one while the device is idle; on the CPU both are whole windows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import _cuda
import torch
import torch.distributed as dist
from _harness import save
from bench_windows import time_window
from torch import Tensor

import pyengine as pe
from pyengine.cli.bench.windows.device import DEVICES, Processor
from pyengine.cli.bench.windows.models import build
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

CASES = ("gpt0", "small0")
WARM_UP, MAX_NORM = 3, 1e-3


@dataclass(frozen=True)
class Variant:
    """What is measured in a window, how it is clipped, and whether its micro-batches may be retried."""

    measure: Callable[[], Any] | None = None
    per: Literal["parameter"] | None = None
    retries: bool = False


VARIANTS = {
    "none": Variant(),
    "control": Variant(),
    "GradNorms": Variant(pe.GradNorms),
    "NoiseScale": Variant(pe.NoiseScale),
    "SpikePolicy": Variant(lambda: pe.SpikePolicy(factor=4)),
    "clip per parameter": Variant(per="parameter"),
    "retry_smaller": Variant(retries=True),
}


class Trained:
    """A model under a variant, with an endless stream of the same micro-batches."""

    def __init__(self, case: str, variant: Variant, device: Processor) -> None:
        self.model, batches = build(case, torch.float32, dist.get_rank(), device=device.device)
        self.variant = variant
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.sync = pe.GradSync(self.model, accumulate=len(batches))
        if variant.measure is not None:
            self.sync.measure(variant.measure())
        self.windows = self.sync.windows(itertools.cycle(batches))
        self.norm = torch.zeros(())

    def loss(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the losses of a micro-batch, and their count."""
        return self.model(x) * len(x), len(x)

    def window(self) -> None:
        """Train one window."""
        for x in next(self.windows):
            if self.variant.retries:
                self.sync.retry_smaller(x, self.loss)
            else:
                loss, count = self.loss(x)
                self.sync.backward(loss, count=count)
        self.norm = self.sync.clip_grad_norm_(MAX_NORM, per=self.variant.per)
        self.sync.step(self.optimizer)

    def check(self, norm: float) -> None:
        """Raise unless the last window had this gradient norm, and its record has what was measured."""
        self.sync.synchronize()
        record = self.sync.last_record
        if abs(float(self.norm) - norm) > 1e-4 * norm or record.skipped or record.num_retries:
            raise RuntimeError(f"{self.variant}: gradient norm {float(self.norm):g} instead of {norm:g}")
        found = {"GradNorms": record.grad_norms, "NoiseScale": record.noise_scale}
        name = getattr(self.variant.measure, "__name__", "")
        if found.get(name, True) is None:
            raise RuntimeError(f"{name}: nothing was measured")


def measure(case: str, rounds: int, device_name: str) -> dict[str, dict[str, float]]:
    """Return min and median milliseconds of a window by variant, on this rank."""
    device = DEVICES[device_name]()
    with device.entered():
        made = {name: Trained(case, variant, device) for name, variant in VARIANTS.items()}
        for each in made.values():
            for _ in range(WARM_UP):
                each.window()
            each.check(float(made["none"].norm))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        names = list(made)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                times[name].append(time_window(made[name].window, device))
    return {name: _summary(taken) for name, taken in times.items()}


def _summary(taken: list[tuple[float, float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for key, values in zip(("window", "host"), zip(*taken, strict=True), strict=True):
        row |= {f"{key}_min_ms": 1e3 * min(values), f"{key}_p50_ms": 1e3 * statistics.median(values)}
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu")
    parser.add_argument("--cases", default=",".join(CASES), help="models of `bench_step.py`")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="write results/<date>-measures[-cuda].json")
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    machine = card(1, options.device) | (_cuda.machine_card() if is_cuda else {})
    cases = {}
    for case in options.cases.split(","):
        arguments = (case, options.rounds, options.device)
        cases[case] = launch(measure, workers=1 if is_cuda else 2, args=arguments)[0]
        _print(case, cases[case])
    if options.save:
        name = "measures-cuda" if is_cuda else "measures"
        print("wrote", save(name, {"machine": machine, "options": vars(options), "cases": cases}))


def _print(case: str, found: dict[str, dict[str, float]]) -> None:
    keys = ("window_min_ms", "window_p50_ms", "host_min_ms", "host_p50_ms")
    print(f"{case}: ms (x none)\n  {'':20}{'window min':>18}{'p50':>18}{'host min':>18}{'p50':>18}")
    for name, row in found.items():
        cells = "".join(f"{row[key]:9.2f} ({row[key] / found['none'][key]:5.2f}) " for key in keys)
        print(f"  {name:20} {cells}", flush=True)


if __name__ == "__main__":
    main()
