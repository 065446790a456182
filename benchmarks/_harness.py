"""Code that the scripts share: options, text tables and dated result files."""

import argparse
import ctypes
import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _cuda
import torch
from kernels.case import Sizes

from pyengine.cli.machine import card

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RESULTS = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the scripts that time kernels."""

    ops: list[str]
    threads: int
    megabytes: int
    seconds: float
    save: bool
    device: str
    once: Path | None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.megabytes, self.device)


def parse_options(description: str | None, *, ops: Sequence[str]) -> Options:
    """Read the command line, which chooses among `ops`, and set torch and malloc up for the measurement."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("ops", nargs="+", choices=ops, help="ops to measure, one after the other")
    parser.add_argument("--once", type=Path, metavar="FILE", help="run each large case once, for a profiler")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, help="of float32 in large cases (default: 128, on CUDA 256)")
    parser.add_argument("--seconds", type=_seconds, default=2.0, help="time budget of one case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-<name>.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    args.megabytes = args.megabytes or (256 if args.device == "cuda" else 128)
    torch.set_num_threads(args.threads)
    hold_memory()
    return Options(**vars(args))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def hold_memory() -> None:
    """Make glibc's malloc keep freed memory until the process ends.

    By default, malloc returns torch's temporaries to the system, so that every call writes to fresh pages.
    Fresh pages make some torch expressions ten times slower.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)


def save(name: str, content: Mapping[str, Any]) -> str:
    """Write a dated result file, and replace an earlier file of the same day; return the path."""
    path = RESULTS / f"{datetime.date.today()}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return str(path.relative_to(RESULTS.parents[1]))


def print_roofs(threads: int, roofs: Mapping[str, float]) -> None:
    """Print a description of the machine, and its memory bandwidths."""
    rounded = {name: round(value, 1) for name, value in roofs.items()}
    print(json.dumps(card(threads)), "\nroofs, one thread, GB/s:", rounded)


# ---- CUDA ----


def measure_and_print_yardstick(options: Options) -> _cuda.Yardstick:
    """Measure and print the yardstick with which times are compared."""
    yardstick = _cuda.measure_yardstick(options.megabytes, options.seconds)
    print(json.dumps(_cuda.machine_card()))
    print({name: round(value, 1) for name, value in dataclasses.asdict(yardstick).items()})
    return yardstick


def save_cuda(stem: str, yardstick: _cuda.Yardstick, content: Mapping[str, Any]) -> str:
    """Write the result file of a run on a CUDA device; return its path."""
    head = {"machine": _cuda.machine_card(), "yardstick": dataclasses.asdict(yardstick)}
    return save(f"{stem}-cuda", head | dict(content))


def print_cuda_header() -> None:
    """Print the column titles for `print_cuda_row`."""
    print(f"{'case':52} {'min us':>9} {'p50 us':>9} {'p99 us':>9} {'idle us':>9} {'GB/s':>7} {'of copy':>8}")


def print_cuda_row(row: dict[str, Any]) -> None:
    """Print pyengine's row of a case and, below it, the rows of the other contestants."""
    for name, mine in row["contestants"].items():
        label = row["case"] if name == _cuda.OURS else f"    {name}"
        print(
            f"{label:52} {mine['min_us']:9.1f} {mine['p50_us']:9.1f} {mine['p99_us']:9.1f} "
            f"{mine['idle_p50_us']:9.1f} {mine['gb_per_s']:7.0f} {mine['share_of_copy']:8.1%}"
            + (" (host-bound)" if mine["is_host_bound"] else "")
        )
