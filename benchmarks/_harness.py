"""What the scripts share: options, tables as text, dated result files. What they measure, and how,
is in pyengine/cli/bench/.
"""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyengine.cli.bench.kernels import cuda
from pyengine.cli.bench.kernels.case import Sizes
from pyengine.cli.bench.kernels.on_cuda import OURS, OnCuda, Yardstick, measure_yardstick
from pyengine.cli.bench.kernels.processor import OPS, OnProcessor
from pyengine.cli.bench.machine import card, hold_memory
from pyengine.cli.bench.timing import measure_roofs

RESULTS = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """What every script of an op takes."""

    threads: int
    megabytes: int
    seconds: float
    save: bool
    device: str

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.megabytes, self.device)


def parse_options(description: str | None) -> Options:
    """Read the command line and put torch and malloc into the state that the numbers are for."""
    parser = argparse.ArgumentParser(description=description)
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
    hold_memory()
    return Options(**vars(args))


def save(name: str, content: Mapping[str, Any]) -> str:
    """Write a dated result file in place of the same day's; return its path."""
    path = RESULTS / f"{datetime.date.today()}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return str(path.relative_to(RESULTS.parents[1]))


def report(stem: str, description: str | None) -> None:
    """Build and measure one case of an op after the other, print the table,
    and write the result file when asked.
    """
    options = parse_options(description)
    (_report_cuda if options.sizes.is_cuda else _report_cpu)(stem, options)


def print_roofs(threads: int, roofs: Mapping[str, float]) -> None:
    """Print the machine and what its memory allows."""
    rounded = {name: round(value, 1) for name, value in roofs.items()}
    print(json.dumps(card(threads)), "\nroofs, one thread, GB/s:", rounded)


def _report_cpu(stem: str, options: Options) -> None:
    bench = OnProcessor(measure_roofs(options.megabytes, options.seconds), options.seconds)
    print_roofs(options.threads, bench.roofs)
    print(f"{'case':44} {'min ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'GB/s':>6} {'x roof':>6} {'x torch':>7}")
    rows = []
    for build in OPS[stem](options.sizes):
        row = bench.measure(build)
        rows.append(row)
        print(
            f"{row['case']:44} {row['min_ms']:8.3f} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} "
            f"{row['gb_per_s']:6.1f} {row['times_roof']:6.2f} {row['times_torch']:7.2f}"
        )
    if options.save:
        content = {"machine": card(options.threads), "roofs_gb_per_s": bench.roofs, "rows": rows}
        print("wrote", save(stem, content))


# ---- CUDA ----


def measure_and_print_yardstick(options: Options) -> Yardstick:
    """Measure what times are held against, and print it."""
    yardstick = measure_yardstick(options.megabytes, options.seconds)
    print(json.dumps(cuda.machine_card()))
    print({name: round(value, 1) for name, value in dataclasses.asdict(yardstick).items()})
    return yardstick


def _report_cuda(stem: str, options: Options) -> None:
    bench = OnCuda(measure_and_print_yardstick(options), options.seconds)
    print_cuda_header()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for build in OPS[stem](options.sizes):
        try:
            rows.append(bench.measure(build))
        except (AssertionError, RuntimeError) as error:  # the other cases are still worth their time
            failed.append(f"{type(error).__name__}: {error}")
            print(f"not timed: {failed[-1]}")
        else:
            print_cuda_row(rows[-1])
            if options.save:  # now: a run that is stopped keeps what it has
                save_cuda(stem, bench.yardstick, {"rows": rows})
    _print_targets(rows)
    if failed:
        raise SystemExit(f"not timed, or pyengine and torch disagree: {'; '.join(failed)}")


def save_cuda(stem: str, yardstick: Yardstick, content: Mapping[str, Any]) -> str:
    """Write the result file of a run on a CUDA device; return its path."""
    head = {"machine": cuda.machine_card(), "yardstick": dataclasses.asdict(yardstick)}
    return save(f"{stem}-cuda", head | dict(content))


def print_cuda_header() -> None:
    """Print the names of the columns of `print_cuda_row`."""
    print(f"{'case':52} {'min us':>9} {'p50 us':>9} {'p99 us':>9} {'idle us':>9} {'GB/s':>7} {'of copy':>8}")


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
    """Say how the large and the many-tensor cases stand: 90 % of the copy rate,
    10 us above the launch floor.
    """
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
