"""Measure windows as one CUDA graph beside the same without:
python benchmarks/bench_captured.py [--save].

One NCCL rank. All contestants take turns window by window in one process; `control` is the captured floor
once more: their difference is noise. `window` is the time of a window that the host launches behind another
one, `host` that until it has launched one while the device is idle.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import _cuda
import torch
from _by_hand import ByHand
from _harness import RESULTS, save
from bench_windows import time_window
from torch import Tensor

from pyengine.cli.bench.windows.device import DEVICES, Processor
from pyengine.cli.bench.windows.measure import Setting
from pyengine.cli.bench.windows.variants import MAX_NORM, VARIANTS, Engine, Variant
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

VARIANTS["by_hand"] = ByHand
CASES = ("gpt124-short:bf16", "small:fp32")
NAMES = ("floor", "no_sync_view", "engine", "attach", "by_hand")
_WARM_UP = 11  # windows that torch asks for before DDP is captured

Run = Callable[[], object]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--cases", default=",".join(CASES), help="model:dtype, eight micro-batches each")
    parser.add_argument("--variants", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write results/<date>-captured-cuda.json")
    options = parser.parse_args()
    machine = card(1, options.device) | (_cuda.machine_card() if options.device == "cuda" else {})
    cases = _saved(machine) if options.save else {}
    for case in options.cases.split(","):
        model, dtype = case.split(":")
        setting = Setting(
            model, dtype, tuple(options.variants.split(",")), options.rounds, device=options.device
        )
        (cases[case],) = launch(measure, workers=1, args=(setting,))
        _print(case, cases[case])
        if options.save:  # now: a run that is stopped keeps what it has
            print(
                "wrote",
                save("captured-cuda", {"machine": machine, "options": vars(options), "cases": cases}),
                flush=True,
            )


def _saved(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the cases of today's result file, if it is of this machine."""
    path = RESULTS / f"{datetime.date.today()}-captured-cuda.json"
    content = json.loads(path.read_text()) if path.exists() else {"machine": None}
    return content["cases"] if content["machine"] == machine else {}


def measure(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the times of each variant in ms, eager and captured, or why it could not be captured."""
    device = DEVICES[setting.device]()
    found: dict[str, dict[str, Any]] = {}
    with device.entered():
        runs: dict[str, Run] = {}
        for name in setting.variants:
            runs[name] = warm(setting, name, device).window
            try:
                runs[f"{name}, captured"] = captured(setting, name, device)
            except (RuntimeError, ValueError) as error:
                found[f"{name}, captured"] = {"failed": str(error).strip().splitlines()[0]}
        if "floor, captured" in runs:
            runs["control"] = runs["floor, captured"]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        names = list(runs)
        for number in range(setting.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                times[name].append(time_window(runs[name], device))
    return {name: _summary(taken) for name, taken in times.items()} | found


def _summary(taken: list[tuple[float, float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for key, values in zip(("window", "host"), zip(*taken, strict=True), strict=True):
        row |= {f"{key}_min_ms": 1e3 * min(values), f"{key}_p50_ms": 1e3 * statistics.median(values)}
    return row


def warm(setting: Setting, name: str, device: Processor, *, windows: int = 3) -> Variant:
    """Return a variant that has trained so many windows."""
    variant = setting.make(name, device)
    for group in variant.optimizer.param_groups:
        group["capturable"] = windows == _WARM_UP
    for _ in range(windows):
        variant.window()
    device.synchronize()
    return variant


# ---- as a CUDA graph ----


def captured(setting: Setting, name: str, device: Processor) -> Run:
    """Return a call that trains a window of a variant by its graph.

    Raises:
        RuntimeError, ValueError: a window cannot be captured, or its replays do not train.
    """
    if setting.device == "cpu":
        return _checked(warm(setting, name, device, windows=_WARM_UP), lambda run: capture(run, "cpu"))
    stream = torch.cuda.Stream()  # of the default one a graph captures nothing
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        variant = warm(setting, name, device, windows=_WARM_UP)
        replay = _checked(variant, lambda run: capture(run, setting.device))
    torch.cuda.current_stream().wait_stream(stream)
    return replay


def capture(run: Run, device: str) -> Run:
    """Capture a call as a graph; return the call that replays it."""
    if device == "cpu":
        raise RuntimeError("a CUDA graph needs a CUDA device")
    graph = torch.cuda.CUDAGraph()
    # "thread_local": NCCL's watchdog queries events from a thread of its own meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run()
    return graph.replay


def _checked(variant: Variant, capture: Callable[[Run], Run]) -> Run:
    """Capture a variant's window; see that a replay trains."""
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
    """Run a graph, and keep alive what it writes to."""
    del variant
    replay()


def _engine_windows(variant: Engine) -> Run:
    """Return a call that trains a window of an engine by its graph."""
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


def _print(case: str, found: dict[str, dict[str, Any]]) -> None:
    print(f"{case}: ms", f"{'':24}{'window':>9}{'min':>9}{'host':>9}{'min':>9}", sep="\n")
    for name, row in found.items():
        keys = ("window_p50_ms", "window_min_ms", "host_p50_ms", "host_min_ms")
        cells = row.get("failed") or "".join(f"{row[key]:9.2f}" for key in keys)
        print(f"{name:24}{cells}", flush=True)


if __name__ == "__main__":
    main()
