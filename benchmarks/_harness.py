"""What the op benchmarks share: machine card, roofs, interleaved timing, table, result file.

Each script first checks that kernel and torch expression agree, then times them in turn, A B A B, so that a change
of the machine's mood hits both. Malloc never gives memory back to the system while a benchmark runs: with default
settings torch's temporaries are fresh pages every call and some torch expressions look ten times slower.
"""

import argparse
import ctypes
import dataclasses
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pyengine import _native

RESULTS = Path(__file__).resolve().parent / "results"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of a table: a kernel, the torch expression it replaces, and the bytes the job must move."""

    name: str
    run: Callable[[], object]
    torch_run: Callable[[], object]
    read_bytes: int
    write_bytes: int
    roof: str  # the class of traffic: "read", "update", "copy"

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def roof_seconds(self, roofs: dict[str, float]) -> float:
        """No pass can beat its class of traffic, nor the plain reading of what it reads."""
        return max(self.num_bytes / roofs[self.roof], self.read_bytes / roofs["read"]) / 1e9


@dataclasses.dataclass(frozen=True)
class Options:
    threads: int
    megabytes: int
    seconds: float
    save: bool


def parse_options() -> Options:
    """Read the command line and put torch and malloc into the state that the numbers are for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=128, help="of float32 in the large cases")
    parser.add_argument("--seconds", type=float, default=2.0, help="time budget of one case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-<stem>.json")
    options = Options(**vars(parser.parse_args()))
    torch.set_num_threads(options.threads)
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    return options


def machine_card(threads: int) -> dict[str, str | int]:
    """Describe the machine without naming it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    core = _native.core()
    return {
        "cpu": models[0] if models else platform.processor(),
        "isa": core.isa() if core else "reference",
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "malloc": "trimming off",
    }


def measure(runs: list[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Time the runs in turn until the budget is spent, at least five rounds; seconds of each call."""
    times = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return times


def measure_roofs(megabytes: int, seconds: float) -> dict[str, float]:
    """GB/s of one thread: reading, updating in place, and the best of three copies."""
    core = _native.core()
    src, dst = torch.ones(megabytes * 2**18), torch.ones(megabytes * 2**18)
    a, b, n = src.data_ptr(), dst.data_ptr(), src.numel()
    runs = [
        lambda: core.roof_read(a, n),
        lambda: core.roof_update(b, n),
        lambda: core.roof_stream_copy(b, a, n),
        lambda: ctypes.memmove(b, a, 4 * n),
    ]
    read, update, stream, memmove = (4 * n / min(taken) / 1e9 for taken in measure(runs, seconds))
    return {"read": read, "update": 2 * update, "copy": 2 * max(stream, memmove), "memcpy": 2 * memmove}


def split(numel: int, dtype: torch.dtype, pieces: int) -> list[torch.Tensor]:
    """Random tensors of equal size, each with an allocation of its own."""
    return [torch.randn(numel // pieces).to(dtype) for _ in range(pieces)]


def report(stem: str, cases: list[Case], options: Options) -> None:
    """Measure, print the table, and write the result file when asked."""
    roofs = measure_roofs(options.megabytes, options.seconds)
    card = machine_card(options.threads)
    print(
        json.dumps(card),
        "\nroofs, one thread, GB/s:",
        {name: round(value, 1) for name, value in roofs.items()},
    )
    print(f"{'case':44} {'min ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'GB/s':>6} {'x roof':>6} {'x torch':>7}")
    rows = []
    for case in cases:
        ours, theirs = measure([case.run, case.torch_run], options.seconds)
        best = min(ours)
        row = {
            "case": case.name,
            "min_ms": best * 1e3,
            "p50_ms": statistics.median(ours) * 1e3,
            "p99_ms": sorted(ours)[int(0.99 * (len(ours) - 1))] * 1e3,
            "torch_min_ms": min(theirs) * 1e3,
            "torch_p50_ms": statistics.median(theirs) * 1e3,
            "gb_per_s": case.num_bytes / best / 1e9,
            "roof": case.roof,
            "times_roof": best / case.roof_seconds(roofs),
            "times_torch": min(theirs) / best,
            "rounds": len(ours),
        }
        rows.append(row)
        print(
            f"{case.name:44} {row['min_ms']:8.3f} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} "
            f"{row['gb_per_s']:6.1f} {row['times_roof']:6.2f} {row['times_torch']:7.2f}"
        )
    if options.save:
        path = RESULTS / f"{datetime.date.today()}-{stem}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"machine": card, "roofs_gb_per_s": roofs, "rows": rows}, indent=2) + "\n")
        print("wrote", path.relative_to(RESULTS.parents[1]))
