"""Time windows of two checkouts in turn: python benchmarks/bench_trees.py BEFORE [--save].

BEFORE is another checkout of pyengine with its core built in place, for example a git worktree. The gloo
ranks of both checkouts stay alive, and the checkouts take turns every few windows, so that whatever slows the
machine down affects both. `control` is BEFORE once more; its difference from BEFORE is noise. The processes
are started several times, because their memory layout differs from start to start.

A ratio compares the medians of one turn. Its interval is the 95 % bootstrap interval of the median ratio.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

WARM_UP, WORLD = 4, 2
AFTER = Path(__file__).resolve().parents[1]


# ---- one rank of one checkout ----


def serve(rank: int, store: str, case: str, variants: Sequence[str]) -> None:
    """Train windows as the lines of stdin request, and write their times in seconds to stdout.

    Each line contains the name of a variant and a number of windows.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist

    try:
        from pyengine.cli.bench.measure import DEVICES, Setting, by_phase
    except ModuleNotFoundError:  # BEFORE may predate the move of that module
        from pyengine.cli.bench.windows.measure import DEVICES, Setting, by_phase

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    model, dtype, micro_batches = case.split(":")
    setting = Setting(model, dtype, tuple(variants), 1, micro_batches=int(micro_batches))
    device = DEVICES["cpu"]()
    with device.entered():
        made = {name: setting.make(name, device) for name in variants}
        torch.set_num_threads(1)  # Accelerate sets a larger number
        for line in sys.stdin:
            name, number = line.split()
            taken = []
            for _ in range(int(number)):
                dist.barrier()
                taken.append(by_phase(made[name].marks(device.now), device.seconds)["window"])
            print(json.dumps(taken), file=answers, flush=True)


# ---- both checkouts ----


class Ranks:
    """The ranks of one checkout."""

    def __init__(self, tree: Path, case: str, variants: Sequence[str], store: str) -> None:
        command = [sys.executable, __file__, str(tree), "--case", case, "--variants", ",".join(variants)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--store", store],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(WORLD)
        ]  # fmt: skip

    def windows(self, variant: str, number: int) -> list[float]:
        """Train windows; return the time of each window in seconds on the slowest rank."""
        for process in self._processes:
            print(variant, number, file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self._processes]
        if not all(answers):
            raise RuntimeError(f"{variant}: a rank has ended; what it printed says why")
        return [max(window) for window in zip(*map(json.loads, answers), strict=True)]

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


@contextmanager
def started(trees: dict[str, Path], case: str, variants: Sequence[str]) -> Iterator[dict[str, Ranks]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = {}
        for name in random.sample(list(trees), len(trees)):
            found[name] = ranks = Ranks(trees[name], case, variants, f"{folder}/{name}")
            stack.callback(ranks.close)
        yield found


def measure(
    trees: dict[str, Path], case: str, variants: Sequence[str], *, starts: int, turns: int, windows: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return times relative to those of `before`, by variant and by each of the other checkouts."""
    seconds: dict[tuple[str, str], list[list[float]]] = {(v, t): [] for v in variants for t in trees}
    for start in range(starts):
        with started(trees, case, variants) as ranks:
            for variant in variants:
                for each in ranks.values():
                    each.windows(variant, WARM_UP)
            for turn in range(turns):
                print(
                    f"\r{case}: start {start + 1} of {starts}, turn {turn + 1} of {turns}", end="", flush=True
                )
                for variant in variants:
                    for name in random.sample(list(trees), len(trees)):
                        # The first window is left out: the caches are full of another checkout's data.
                        seconds[variant, name].append(ranks[name].windows(variant, windows + 1)[1:])
    print()
    others = [name for name in trees if name != "before"]
    return {v: {name: compared(seconds[v, "before"], seconds[v, name]) for name in others} for v in variants}


def compared(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> dict[str, float]:
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(after, before, strict=True)]
    draw = random.Random(0)  # noqa: S311 - no secret
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    fastest = [min(map(min, times)) for times in (before, after)]
    return {
        "ratio": statistics.median(ratios),
        "low": medians[50],
        "high": medians[-51],
        "min_ratio": fastest[1] / fastest[0],
        "before_min_ms": 1e3 * fastest[0],
        "before_p50_ms": 1e3 * statistics.median(t for times in before for t in times),
    }


def main() -> None:
    """Run the benchmark, print its results, and save them if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--after", type=Path, default=AFTER, help="the new checkout (default: this one)")
    parser.add_argument(
        "--case",
        action="append",
        help="model:dtype:micro-batches, with a model of `python -m pyengine bench`",
    )
    parser.add_argument("--variants", default="floor,no_sync_view,engine,engine_bf16,attach")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--windows", type=int, default=3, help="windows of each checkout in a turn")
    parser.add_argument("--save", action="store_true", help="write results/<date>-trees.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    variants = options.variants.split(",")
    if options.rank is not None:
        serve(options.rank, options.store, options.case[0], variants)
        return
    before = options.before.resolve()
    trees = {"before": before, "after": options.after.resolve(), "control": before}
    cases = {}
    for case in options.case or ("gpt0:fp32:8", "small0:fp32:8"):
        cases[case] = found = measure(
            trees, case, variants, starts=options.starts, turns=options.turns, windows=options.windows
        )
        for variant, others in found.items():
            for name, row in others.items():
                interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
                fastest = f"fastest {row['min_ratio']:.3f}; before {row['before_p50_ms']:.2f} ms"
                print(f"{variant:16} {name:8} {row['ratio']:.3f} of before {interval}, {fastest}")
    if options.save:
        from _harness import save

        from pyengine.cli.machine import card

        commits = {name: commit_of(tree) for name, tree in trees.items()}
        numbers = {name: getattr(options, name) for name in ("starts", "turns", "windows")}
        content = {"machine": card(1), "commits": commits, "options": numbers, "cases": cases}
        print("wrote", save("trees", content))


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
