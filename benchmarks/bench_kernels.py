"""Compare kernels with torch expressions that do the same work:
python benchmarks/bench_kernels.py pack exact [--device cuda] [--save].

With `--once FILE`, each large case runs once, for a profiler that `gpu.py` starts, and the names of the cases
are written to FILE. The profiler counts only the work between `cudaProfilerStart` and `cudaProfilerStop`.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import _cuda
import torch
from _harness import (
    Options,
    measure_and_print_yardstick,
    parse_options,
    print_cuda_header,
    print_cuda_row,
    print_roofs,
    save,
    save_cuda,
)
from kernels.case import Build, Sizes
from kernels.measure import OPS, measure, measure_roofs

from pyengine.cli.machine import card

# These occur in the names of cases with many or small tensors, or with a size other than that of large cases.
_OTHERS = ("400", "1000", "MiB")


def main() -> None:
    """Measure the cases of each op, print a table per op and, if asked, write a result file per op."""
    options = parse_options(__doc__, ops=tuple(OPS))
    if options.once is not None:
        run_once(options, options.once)
        return
    for op in options.ops:
        (_report_cuda if options.sizes.is_cuda else _report_cpu)(op, options)


def _report_cpu(op: str, options: Options) -> None:
    roofs = measure_roofs(options.megabytes, options.seconds)
    print_roofs(options.threads, roofs)
    print(f"{'case':44} {'min ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'GB/s':>6} {'x roof':>6} {'x torch':>7}")
    rows = []
    for build in OPS[op](options.sizes):
        row = measure(build, roofs, options.seconds)
        rows.append(row)
        print(
            f"{row['case']:44} {row['min_ms']:8.3f} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} "
            f"{row['gb_per_s']:6.1f} {row['times_roof']:6.2f} {row['times_torch']:7.2f}"
        )
    if options.save:
        content = {"machine": card(options.threads), "roofs_gb_per_s": roofs, "rows": rows}
        print("wrote", save(op, content))


def _report_cuda(op: str, options: Options) -> None:
    yardstick = measure_and_print_yardstick(options)
    print_cuda_header()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for build in _cuda.cases(op, options.sizes):
        try:
            rows.append(_cuda.measure_case(build, yardstick, options.seconds))
        except (AssertionError, RuntimeError) as error:  # the other cases can still be measured
            failed.append(f"{type(error).__name__}: {error}")
            print(f"not timed: {failed[-1]}")
        else:
            print_cuda_row(rows[-1])
            if options.save:  # after each case, so that a stopped run keeps its results
                save_cuda(op, yardstick, {"rows": rows})
    _print_targets(rows)
    if failed:
        raise SystemExit(f"not timed, or pyengine and torch disagree: {'; '.join(failed)}")


def _print_targets(rows: list[dict[str, Any]]) -> None:
    """Print whether cases reach their targets.

    A large case should reach 90 % of the copy rate. A case with 1000 tensors should take at most 10 us more
    than the launch floor.
    """
    for row in rows:
        ours = row["contestants"][_cuda.OURS]
        if row["num_bytes"] >= 256 * 2**20:
            met = "met " if ours["share_of_copy"] >= 0.9 else "MISS"
            print(f"{met} 90 % of the copy rate: {ours['share_of_copy']:6.1%}  {row['case']}")
        if " 1000 " in row["case"]:
            for name in (_cuda.OURS, _cuda.LISTS):
                mine = row["contestants"][name]
                met = "met " if mine["above_floor_us"] <= 10 else "MISS"
                times = f"{mine['above_floor_us']:6.1f} us, from idle {mine['idle_above_floor_us']:6.1f}"
                print(f"{met} 10 us above the launch floor: {times}  {row['case']}, {name}")


def large(ops: Sequence[str], sizes: Sizes) -> dict[str, Build]:
    """Return, by name, the cases that have a few large tensors."""
    builds = {str(build.args[0]): build for op in ops for build in _cuda.cases(op, sizes)}
    return {name: build for name, build in builds.items() if not any(part in name for part in _OTHERS)}


def run_once(options: Options, file: Path) -> None:
    """Run each large case once, and write the names of the cases in the order of the runs."""
    done: list[str] = []
    is_cuda = options.sizes.is_cuda
    for name, build in large(options.ops, options.sizes).items():
        case = build()
        if is_cuda:
            torch.cuda.synchronize()
        with torch.cuda.profiler.profile() if is_cuda else nullcontext():
            case.run()
            if is_cuda:
                torch.cuda.synchronize()
        done.append(name)
        machine = card(1) | (_cuda.machine_card() if is_cuda else {})
        content = {"machine": machine, "megabytes": options.megabytes, "cases": done}
        file.write_text(json.dumps(content))  # after each case, so that a stopped run keeps its results
        print(name, flush=True)
    print(f"{len(done)} cases")


if __name__ == "__main__":
    main()
