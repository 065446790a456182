"""Whole windows on CUDA devices, a rank a device over NCCL, and how the host drives them.

    python benchmarks/bench_windows.py gpt124:bf16:8 [--out FILE]

Window times are those of `python -m pyengine bench step --device cuda`. Further windows of each variant
measure milliseconds until the host has launched a window of an idle device (`host`), kernels
launched, copies and fills, and waits for the device, as the profiler counts them, and the largest memory
(`peak`).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _cuda
import torch
from _by_hand import ByHand
from table import tables
from torch.profiler import ProfilerActivity, profile

from pyengine.cli.bench.windows.device import DEVICES, Processor
from pyengine.cli.bench.windows.measure import Outcome, Setting, measure, merged, rows
from pyengine.cli.bench.windows.variants import VARIANTS, Variant
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

VARIANTS["by_hand"] = ByHand
# The most telling first.
DEFAULT = "engine,no_sync_view,engine_bf16,attach,no_sync_bf16,accelerate,floor,by_hand"
_TIMEOUT_S = 90.0

Run = Callable[[], object]


def main() -> None:
    """Measure, print the tables, and write the result file if asked."""
    options = _options()
    model, dtype, micro_batches = options.case.split(":")
    names = tuple(options.variants.split(","))
    setting = Setting(
        model, dtype, names, options.rounds, device=options.device, micro_batches=int(micro_batches)
    )
    found = rows(merged(launch(_times, workers=options.world, args=(setting,))))
    names = [name for name, row in found.items() if "failed" not in row]
    for name, row in figures(setting, names, options.world).items():
        found[name] |= row
    machine = card(1, options.device) | (_cuda.machine_card() if options.device == "cuda" else {})
    machine |= {"ranks": options.world, "network": "NCCL" if options.device == "cuda" else "loopback"}
    content = {"machine": machine, "options": vars(options) | {"out": None}, "cases": {setting.name: found}}
    for table in tables(content):
        print("", *table, sep="\n")
    if options.out:
        options.out.write_text(json.dumps(content, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help="model:dtype:micro-batches")
    parser.add_argument("--variants", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--world", type=int, help="ranks (default: one a device)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    options = parser.parse_args()
    options.world = options.world or max(1, torch.cuda.device_count())
    return options


def _times(setting: Setting) -> Outcome:
    return measure(setting, lambda done: None)


# ---- in further windows ----


def figures(setting: Setting, names: Sequence[str], world: int) -> dict[str, dict[str, Any]]:
    """Return the figures of variants beside their times: the largest of all ranks, or why there are none."""
    try:
        ranks = launch(counts, workers=world, args=(setting, tuple(names)), timeout_s=_TIMEOUT_S)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).strip().splitlines()[-1]
        return {name: {"not_counted": why} for name in names}
    return {name: {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]} for name in names}


def counts(setting: Setting, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return each variant's host time of a window and, on CUDA, its memory and calls, on this rank."""
    device = DEVICES[setting.device]()
    with device.entered():
        return {name: _count(setting, name, device) for name in names}


def _count(setting: Setting, name: str, device: Processor) -> dict[str, float]:
    gc.collect()
    held = torch.cuda.memory_allocated() if setting.device == "cuda" else 0  # by earlier variants
    variant = setting.make(name, device)
    for _ in range(2):
        variant.marks(lambda: None)
    device.synchronize()
    taken = [time_window(lambda: variant.marks(lambda: None), device)[1] for _ in range(setting.rounds)]
    found: dict[str, float] = {"host_p50_ms": statistics.median(taken) * 1e3}
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        variant.marks(lambda: None)
        device.synchronize()
        found["peak_mb"] = (torch.cuda.max_memory_allocated() - held) / 2**20
        found |= launches(_calls(variant, device))
    return found


def _calls(variant: Variant, device: Processor) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        variant.marks(lambda: None)
        device.synchronize()
    return Counter({each.key: each.count for each in profiler.key_averages()})


def launches(calls: Mapping[str, int]) -> dict[str, int]:
    """Return how many kernels, copies and fills, and waits for the device there are among calls by name."""

    def total(pattern: str) -> int:
        return sum(number for name, number in calls.items() if re.match(pattern, name))

    # cudaDeviceSynchronize is the profiler's own: it waits where it begins and ends.
    return {
        "launches": total(r"cu(da)?LaunchKernel"),
        "copies": total(r"cu(da)?(Memcpy|Memset)"),
        "waits": total(r"cu(da)?(Stream|Event)Synchronize"),
    }


def time_window(window: Run, device: Processor) -> tuple[float, float]:
    """Return the seconds of a window on the device and on the host.

    The host's is that of a first window, which finds the device idle and has nothing to wait for; the
    device's that of a second one, which the host has launched behind it.
    """
    device.synchronize()
    start = time.perf_counter()
    window()
    host = time.perf_counter() - start
    begin = device.now()
    window()
    end = device.now()
    device.synchronize()
    return device.seconds(begin, end), host


if __name__ == "__main__":
    main()
