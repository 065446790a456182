"""What the op benchmarks share: machine card, roofs, interleaved timing, table, result file.

Each script first checks that kernel and torch expression agree, then times them in turn, A B A B, so that a change
of the machine's mood hits both. Malloc never gives memory back to the system while a benchmark runs: with default
settings torch's temporaries are fresh pages every call and some torch expressions look ten times slower.

With `--device cuda` the same cases run there, timed by events (`_cuda.py`), against more contestants and the copy rate.
"""

import argparse
import ctypes
import dataclasses
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _cuda
import torch

from pyengine import _native
from pyengine._ops import BucketPlan
from pyengine.layout import ALIGN_ELEMENTS

RESULTS = Path(__file__).resolve().parent / "results"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of a table: a kernel, the torch expression it replaces, and the bytes the job must move.

    `others` are further contestants, which only a CUDA device times.
    """

    name: str
    run: Callable[[], object]
    torch_run: Callable[[], object]
    read_bytes: int
    write_bytes: int
    roof: str  # the class of traffic: "read", "update", "copy"
    others: Mapping[str, Callable[[], object]] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def roof_seconds(self, roofs: dict[str, float]) -> float:
        """No pass can beat its class of traffic, nor the plain reading of what it reads."""
        return max(self.num_bytes / roofs[self.roof], self.read_bytes / roofs["read"]) / 1e9


Build = Callable[[], Case]


@dataclasses.dataclass(frozen=True)
class Slots:
    """Equal slots side by side in a flat buffer, and the tensors that belong to them."""

    pieces: int
    each: int
    device: str

    @property
    def numel(self) -> int:
        return self.pieces * self.each

    def plan(self) -> BucketPlan:
        return BucketPlan(range(0, self.numel, self.each), [self.each] * self.pieces)

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Random tensors, each with an allocation of its own."""
        return [torch.randn(self.each, device=self.device).to(dtype) for _ in range(self.pieces)]

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.numel, dtype=dtype, device=self.device)

    def scalar(self, value: float) -> torch.Tensor:
        return torch.tensor(value, device=self.device)


@dataclasses.dataclass(frozen=True)
class Options:
    threads: int
    megabytes: int
    seconds: float
    save: bool
    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def slots(self, numel: int, pieces: int) -> Slots:
        """Cut `numel` elements into slots; on CUDA each begins where the engine would let it begin."""
        each = numel // pieces
        return Slots(pieces, each // ALIGN_ELEMENTS * ALIGN_ELEMENTS if self.is_cuda else each, self.device)


def parse_options() -> Options:
    """Read the command line and put torch and malloc into the state that the numbers are for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, help="of float32 in the large cases: 128, on CUDA 256")
    parser.add_argument("--seconds", type=float, default=2.0, help="time budget of one case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-<stem>.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    args.megabytes = args.megabytes or (256 if args.device == "cuda" else 128)
    torch.set_num_threads(args.threads)
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    return Options(**vars(args))


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


def report(stem: str, builds: Sequence[Build], options: Options) -> None:
    """Build and measure one case after the other, print the table, and write the result file when asked."""
    if options.is_cuda:
        _report_cuda(stem, builds, options)
    else:
        _report_cpu(stem, builds, options)


def save(name: str, content: Mapping[str, Any]) -> str:
    """Write a dated result file in place of the same day's; return its path."""
    path = RESULTS / f"{datetime.date.today()}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return str(path.relative_to(RESULTS.parents[1]))


def percentile(times: Sequence[float], share: float) -> float:
    """Return the time that `share` of all calls stay below."""
    return sorted(times)[int(share * (len(times) - 1))]


def _report_cpu(stem: str, builds: Sequence[Build], options: Options) -> None:
    roofs = measure_roofs(options.megabytes, options.seconds)
    card = machine_card(options.threads)
    print(
        json.dumps(card),
        "\nroofs, one thread, GB/s:",
        {name: round(value, 1) for name, value in roofs.items()},
    )
    print(f"{'case':44} {'min ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'GB/s':>6} {'x roof':>6} {'x torch':>7}")
    rows = []
    for build in builds:
        case = build()
        ours, theirs = measure([case.run, case.torch_run], options.seconds)
        best = min(ours)
        row = {
            "case": case.name,
            "min_ms": best * 1e3,
            "p50_ms": statistics.median(ours) * 1e3,
            "p99_ms": percentile(ours, 0.99) * 1e3,
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
        print("wrote", save(stem, {"machine": card, "roofs_gb_per_s": roofs, "rows": rows}))


# ---- CUDA ----

OURS, COPY = "pyengine", "copy_ of as many bytes"


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What the times of a CUDA run are held against, measured in the same run."""

    copy_gb_per_s: float
    floor_queued_us: float
    floor_idle_us: float


def measure_yardstick(options: Options) -> Yardstick:
    """Measure the copy rate of large buffers and the time of a launch that does nothing."""
    num_bytes = 8 * options.megabytes * 2**20
    copies, fills = [_cuda.copier(num_bytes) for _ in range(2)], [_cuda.filler()]
    copy = _cuda.measure([_cuda.Queued(_cuda.rotate([{COPY: run} for run in copies])[COPY])], options.seconds)
    floors = _cuda.measure([_cuda.Queued(fills[0]), _cuda.Idle(fills[0])], options.seconds / 2)
    queued, idle = (statistics.median(times) * 1e6 for times in floors)
    yardstick = Yardstick(num_bytes / statistics.median(copy[0]) / 1e9, queued, idle)
    print(json.dumps(_cuda.machine_card()))
    print({name: round(value, 1) for name, value in dataclasses.asdict(yardstick).items()})
    return yardstick


def compete(sets: Sequence[dict[str, _cuda.Run]], seconds: float) -> dict[str, dict[str, float | bool]]:
    """Let contestants take turns over rotating sets; return each one's times on the device and from an idle stream."""
    runs = _cuda.rotate(sets)
    for _ in sets:
        for run in runs.values():
            run()
    queued = {name: _cuda.Queued(run) for name, run in runs.items()}
    device = _cuda.measure(list(queued.values()), 0.7 * seconds)
    idle = _cuda.measure([_cuda.Idle(run) for run in runs.values()], 0.3 * seconds)
    return {
        name: {
            "min_us": min(mine) * 1e6,
            "p50_us": statistics.median(mine) * 1e6,
            "p99_us": percentile(mine, 0.99) * 1e6,
            "idle_p50_us": statistics.median(with_host) * 1e6,
            "rounds": len(mine),
            "is_host_bound": queued[name].is_host_bound,
        }
        for name, mine, with_host in zip(runs, device, idle, strict=True)
    }


def _report_cuda(stem: str, builds: Sequence[Build], options: Options) -> None:
    yardstick = measure_yardstick(options)
    print_cuda_header()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for build in builds:
        try:
            name, num_bytes, sets = _build_sets(build)
            rows.append(cuda_row(name, num_bytes, compete(sets, options.seconds), yardstick))
        except (AssertionError, RuntimeError) as error:  # the other cases are still worth their time
            failed.append(f"{type(error).__name__}: {error}")
            print(f"not timed: {failed[-1]}")
        else:
            print_cuda_row(rows[-1])
            if options.save:  # now: a run that is stopped keeps what it has
                save_cuda(stem, yardstick, {"rows": rows})
    _print_targets(rows)
    if failed:
        raise SystemExit(f"not timed, or pyengine and torch disagree: {'; '.join(failed)}")


def _build_sets(build: Build) -> tuple[str, int, list[dict[str, _cuda.Run]]]:
    first = build()
    cases = [first, *(build() for _ in range(_cuda.num_sets(first.num_bytes) - 1))]
    sets = [
        {OURS: case.run, "torch": case.torch_run, **case.others, COPY: _cuda.copier(case.num_bytes)}
        for case in cases
    ]
    return first.name, first.num_bytes, sets


def save_cuda(stem: str, yardstick: Yardstick, content: Mapping[str, Any]) -> str:
    """Write the result file of a run on a CUDA device; return its path."""
    head = {"machine": _cuda.machine_card(), "yardstick": dataclasses.asdict(yardstick)}
    return save(f"{stem}-cuda", head | dict(content))


def print_cuda_header() -> None:
    """Print the names of the columns of `print_cuda_row`."""
    print(f"{'case':52} {'min us':>9} {'p50 us':>9} {'p99 us':>9} {'idle us':>9} {'GB/s':>7} {'of copy':>8}")


def cuda_row(
    name: str, num_bytes: int, times: dict[str, dict[str, float | bool]], yardstick: Yardstick
) -> dict[str, Any]:
    """Return a case's row of a result file: `contestants` by name, each with its rate for the job's `num_bytes`."""
    for mine in times.values():
        mine["gb_per_s"] = num_bytes / mine["p50_us"] / 1e3
        mine["share_of_copy"] = mine["gb_per_s"] / yardstick.copy_gb_per_s
        mine["above_floor_us"] = mine["p50_us"] - yardstick.floor_queued_us
        mine["idle_above_floor_us"] = mine["idle_p50_us"] - yardstick.floor_idle_us
    return {"case": name, "num_bytes": num_bytes, "contestants": times}


def print_cuda_row(row: dict[str, Any]) -> None:
    """Print a case, and its other contestants under it."""
    for name, mine in row["contestants"].items():
        label = row["case"] if name == OURS else f"    {name}"
        print(
            f"{label:52} {mine['min_us']:9.1f} {mine['p50_us']:9.1f} {mine['p99_us']:9.1f} "
            f"{mine['idle_p50_us']:9.1f} {mine['gb_per_s']:7.0f} {mine['share_of_copy']:8.1%}"
            + (" (host-bound)" if mine["is_host_bound"] else "")
        )


def _print_targets(rows: list[dict[str, Any]]) -> None:
    """Say how the large and the many-tensor cases stand: 90 % of the copy rate, 10 us above the launch floor."""
    for row in rows:
        ours = row["contestants"][OURS]
        if row["num_bytes"] >= 256 * 2**20:
            met = "met " if ours["share_of_copy"] >= 0.9 else "MISS"
            print(f"{met} 90 % of the copy rate: {ours['share_of_copy']:6.1%}  {row['case']}")
        if " 1000 " in row["case"]:
            for name in (OURS, "raw lists"):
                mine = row["contestants"][name]
                met = "met " if mine["above_floor_us"] <= 10 else "MISS"
                times = f"{mine['above_floor_us']:6.1f} us, from idle {mine['idle_above_floor_us']:6.1f}"
                print(f"{met} 10 us above the launch floor: {times}  {row['case']}, {name}")
