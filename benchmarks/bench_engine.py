"""What an engine costs but for its gradients, through the process group and in memory that ranks share:
python benchmarks/bench_engine.py [--world 4] [--save].

Real gloo workers with one thread each, and a model of one small layer. Engines of both kinds take turns: each
is made, trains five windows, and is closed. What is reported is the slowest worker's time.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.distributed as dist
from _harness import save
from torch import nn

import pyengine as pe
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

PHASES = ("make", "first window", "window", "close")
KINDS = {"process group": False, "shared memory": True}
WINDOWS = 5
WARM_UP = 2

# Milliseconds of each engine, by kind and phase.
Times = dict[str, dict[str, list[float]]]


def engine(*, shared_memory: bool) -> list[float]:
    """Make an engine, train, and close it; return the times of `PHASES`, of the slowest worker."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = [_now()]
    sync = pe.GradSync(model, shared_memory=shared_memory)
    for _ in range(WINDOWS):
        times.append(_now())
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 8)).sum())
        sync.step(optimizer)
    times.append(_now())
    sync.close()
    times.append(_now())
    taken = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    return [taken[0], taken[1], statistics.median(taken[2:-1]), taken[-1]]


def _now() -> float:
    """Return the time at which every worker has come here."""
    dist.barrier()
    return time.perf_counter()


def work(rounds: int) -> Times:
    """Measure on one worker."""
    torch.set_num_threads(1)
    times: Times = {kind: {phase: [] for phase in PHASES} for kind in KINDS}
    for done in range(rounds + WARM_UP):
        kinds = list(KINDS) if done % 2 else list(KINDS)[::-1]
        for kind in kinds:
            taken = engine(shared_memory=KINDS[kind])
            if done >= WARM_UP:
                for phase, milliseconds in zip(PHASES, taken, strict=True):
                    times[kind][phase].append(milliseconds)
    return times


def _cell(taken: list[float]) -> dict[str, float]:
    return {"min_ms": min(taken), "p50_ms": statistics.median(taken)}


def main() -> None:
    """Measure, print a table, and write the result file when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-engine-<N>.json")
    options = parser.parse_args()
    times = launch(work, workers=options.world, args=(options.rounds,))[0]
    rows = {
        kind: {
            phase: {"min_ms": min(taken), "p50_ms": statistics.median(taken)} for phase, taken in of.items()
        }
        for kind, of in times.items()
    }
    print(f"{'ms, min and median':20}" + "".join(f"{phase:>20}" for phase in PHASES))
    for kind, row in rows.items():
        cells = [f"{cell['min_ms']:.2f} {cell['p50_ms']:.2f}" for cell in row.values()]
        print(f"{kind:20}" + "".join(f"{cell:>20}" for cell in cells))
    if options.save:
        content = {"machine": card(1), "options": vars(options), "rows": rows}
        print("wrote", save(f"engine-{options.world}", content))


if __name__ == "__main__":
    main()
