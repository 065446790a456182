"""Time whole windows on CUDA devices (one NCCL rank per device), launched by the host and as one CUDA graph.

    python benchmarks/bench_windows.py gpt124:bf16:8 small:fp32:8 [--save]

A case consists of a model, a dtype and a number of micro-batches. All contestants take turns window by window
in the same processes. `control` is the captured floor once more; the difference between the two is noise.
`window` is the time of a window that the host launches right after another window. `host` is the time that
the host takes to launch a window while the device is idle. In additional windows, the profiler counts kernel
launches, copies (including fills), and waits of the host for the device. `peak` is the peak memory of the
warm-up. Windows are captured only if there is a single rank.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import _cuda
import torch
import torch.distributed as dist
from _by_hand import ByHand
from _harness import RESULTS, save
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyengine.cli.bench.device import DEVICES, Processor
from pyengine.cli.bench.measure import Setting, odd_ones
from pyengine.cli.bench.variants import MAX_NORM, VARIANTS, Engine, Variant
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

VARIANTS["by_hand"] = ByHand
DEFAULT = "engine,no_sync_view,engine_bf16,attach,no_sync_bf16,accelerate,floor,by_hand"
CAPTURED = ("floor", "no_sync_view", "engine", "attach", "by_hand")
COLUMNS = ("window_p50_ms", "window_min_ms", "host_p50_ms", "host_min_ms", "launches", "waits", "peak_mb")
_WARM_UP = 11  # windows that torch requires before DDP is captured

Run = Callable[[], object]
Row = dict[str, Any]


def main() -> None:
    """Measure and print each case, and save its results if requested."""
    options = _options()
    machine = card(1, options.device) | (_cuda.machine_card() if options.device == "cuda" else {})
    machine |= {"ranks": options.world, "network": "NCCL" if options.device == "cuda" else "loopback"}
    cases = _saved(machine) if options.save else {}
    for case in options.cases:
        model, dtype, micro_batches = case.split(":")
        names = tuple(options.variants.split(","))
        setting = Setting(
            model, dtype, names, options.rounds, device=options.device, micro_batches=int(micro_batches)
        )
        ranks = launch(measure, workers=options.world, args=(setting,))
        cases[case] = {name: _slowest([rank[name] for rank in ranks]) for name in ranks[0]}
        _print(case, cases[case])
        if options.save:  # after each case, so that a stopped run keeps its results
            content = {"machine": machine, "options": vars(options), "cases": cases}
            print("wrote", save("windows-cuda", content), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", help="model:dtype:micro-batches")
    parser.add_argument("--variants", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--world", type=int, help="ranks (default: one per device)")
    parser.add_argument("--save", action="store_true", help="write results/<date>-windows-cuda.json")
    options = parser.parse_args()
    options.world = options.world or max(1, torch.cuda.device_count())
    return options


def _saved(machine: Row) -> dict[str, Any]:
    """Return the cases of today's result file, if it is from this machine."""
    path = RESULTS / f"{datetime.date.today()}-windows-cuda.json"
    content = json.loads(path.read_text()) if path.exists() else {"machine": None}
    return content["cases"] if content["machine"] == machine else {}


def _slowest(rows: list[Row]) -> Row:
    """Return the largest value of each figure over all ranks."""
    return {key: max(row[key] for row in rows) for key in rows[0]}


def measure(setting: Setting) -> dict[str, Row]:
    """Return the figures of each variant on this rank, eager and captured, or why it was not captured."""
    device = DEVICES[setting.device]()
    found: dict[str, Row] = {}
    with device.entered():
        runs: dict[str, Run] = {}
        variants: dict[str, Variant] = {}
        for name in setting.variants:
            variants[name], memory = _with_memory(partial(warm, setting, name, device), setting.device)
            runs[name] = variants[name].window
            found[name] = memory
        if odd := odd_ones(variants, None):
            raise RuntimeError(next(iter(odd.values())))
        for name in CAPTURED if dist.get_world_size() == 1 else ():
            if name in variants:
                try:
                    runs[f"{name}, captured"] = captured(setting, name, device)
                except (RuntimeError, ValueError) as error:
                    found[f"{name}, captured"] = {"failed": str(error).strip().splitlines()[0]}
        if "floor, captured" in runs:
            runs["control"] = runs["floor, captured"]
        for name, times in _in_turn(runs, setting.rounds, device).items():
            found[name] = found.get(name, {}) | times
        if setting.device == "cuda":
            for name, run in runs.items():
                found[name] |= launches(_calls(run, device))
    return found


def _with_memory(make: Callable[[], Variant], device: str) -> tuple[Variant, Row]:
    """Create a variant; return it and its peak memory."""
    if device == "cpu":
        return make(), {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    variant = make()
    return variant, {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}


def _in_turn(runs: Mapping[str, Run], rounds: int, device: Processor) -> dict[str, Row]:
    """Time a window of each variant in every round; no variant always follows the same variant."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(time_window(runs[name], device))
    return {name: _summary(taken) for name, taken in times.items()}


def _summary(taken: list[tuple[float, float]]) -> Row:
    row: Row = {}
    for key, values in zip(("window", "host"), zip(*taken, strict=True), strict=True):
        row |= {f"{key}_min_ms": 1e3 * min(values), f"{key}_p50_ms": 1e3 * statistics.median(values)}
    return row


def time_window(window: Run, device: Processor) -> tuple[float, float]:
    """Return the time of a window in seconds, on the device and on the host.

    The host's time is that of a first window, which finds the device idle and waits for nothing. The device's
    time is that of a second window, which the host launches right after the first.
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


def _calls(run: Run, device: Processor) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        device.synchronize()
    return Counter({each.key: each.count for each in profiler.key_averages()})


def launches(calls: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of kernel launches, of copies and fills, and of waits for the device in `calls`."""

    def total(pattern: str) -> int:
        return sum(number for name, number in calls.items() if re.match(pattern, name))

    # cudaDeviceSynchronize is left out, because the profiler calls it when it starts and stops.
    return {
        "launches": total(r"cu(da)?LaunchKernel"),
        "copies": total(r"cu(da)?(Memcpy|Memset)"),
        "waits": total(r"cu(da)?(Stream|Event)Synchronize"),
    }


def warm(setting: Setting, name: str, device: Processor, *, windows: int = 3) -> Variant:
    """Return a variant that has trained `windows` windows."""
    variant = setting.make(name, device)
    for group in variant.optimizer.param_groups:
        group["capturable"] = windows == _WARM_UP
    for _ in range(windows):
        variant.window()
    device.synchronize()
    return variant


# ---- as a CUDA graph ----


def captured(setting: Setting, name: str, device: Processor) -> Run:
    """Return a function that trains a window of a variant by replaying its CUDA graph.

    Raises:
        RuntimeError, ValueError: a window cannot be captured, or its replays do not train.
    """
    if setting.device == "cpu":
        return _checked(warm(setting, name, device, windows=_WARM_UP), lambda run: capture(run, "cpu"))
    stream = torch.cuda.Stream()  # a graph cannot capture the default stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        variant = warm(setting, name, device, windows=_WARM_UP)
        replay = _checked(variant, lambda run: capture(run, setting.device))
    torch.cuda.current_stream().wait_stream(stream)
    return replay


def capture(run: Run, device: str) -> Run:
    """Capture a call as a CUDA graph; return a function that replays the graph."""
    if device == "cpu":
        raise RuntimeError("a CUDA graph needs a CUDA device")
    graph = torch.cuda.CUDAGraph()
    # "thread_local", because NCCL's watchdog queries events from another thread meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run()
    return graph.replay


def _checked(variant: Variant, capture: Callable[[Run], Run]) -> Run:
    """Capture a variant's window; check that a replay trains."""
    replay = _engine_windows(variant) if isinstance(variant, Engine) else capture(variant.window)
    before = [parameter.detach().clone() for parameter in variant.model.parameters()]
    replay()
    pairs = zip(variant.model.parameters(), before, strict=True)
    has_moved = any(not bool((parameter == old).all()) for parameter, old in pairs)
    norm = float(variant.grad_norm)
    if not (has_moved and 0 < norm < float("inf")):
        raise RuntimeError(
            f"the window was captured, and a replay does not train: gradient norm {norm:g}, parameters "
            f"{'changed' if has_moved else 'unchanged'}"
        )

    return partial(_run, replay, variant)


def _run(replay: Run, variant: Variant) -> None:
    """Replay a graph; the argument `variant` keeps alive the tensors that the graph writes to."""
    del variant
    replay()


def _engine_windows(variant: Engine) -> Run:
    """Return a function that trains a window of an engine by replaying its CUDA graph."""
    sync = variant.sync

    def train_window(batches: list[Tensor]) -> None:
        for x in batches:
            sync.backward(variant.forward(x))
        variant.grad_norm = sync.clip_grad_norm_(MAX_NORM)
        sync.step(variant.optimizer)

    step = sync.capture(train_window)
    windows = sync.windows(itertools.cycle(variant.micro_batches))

    def train() -> None:
        step(next(windows))

    for _ in range(_WARM_UP + 1):
        train()
    if not step.num_captured:
        raise RuntimeError("; ".join(step.problems))
    return train


def _print(case: str, found: Mapping[str, Row]) -> None:
    print(case, f"{'':28}" + "".join(f"{name:>15}" for name in COLUMNS), sep="\n")
    for name, row in found.items():
        cells = row.get("failed") or "".join(f"{row.get(key, float('nan')):15.2f}" for key in COLUMNS)
        print(f"{name:28}{cells}", flush=True)


if __name__ == "__main__":
    main()
