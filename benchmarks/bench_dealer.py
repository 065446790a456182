"""Fixed shares against dealing, with one worker slowed down: python benchmarks/bench_dealer.py [--slowdown 3]
[--save].

Real gloo workers with one thread each; the last one sleeps after every micro-batch until it has taken
`slowdown` times as long as it computed. Fixed and dealt windows take turns. What is reported is the slowest
worker's time.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from _harness import save

import pyengine as pe
from pyengine.cli.bench.windows.models import GPT, GPT_CONTEXT, GPT_VOCABULARY, Shape
from pyengine.cli.machine import card
from pyengine.comm.launching import launch

MICRO_BATCHES = 12


class _Rank:
    """One worker's model and engine; windows of 12 micro-batches over all ranks."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        torch.manual_seed(0)
        self.model = GPT(Shape(192))
        self.data = torch.randint(GPT_VOCABULARY, (MICRO_BATCHES, GPT_CONTEXT + 1))
        self.sampler = pe.WindowSampler(MICRO_BATCHES, seed=0, micro_batch=1, global_batch=MICRO_BATCHES)
        self.dealer = pe.Dealer(self.sampler)
        exact = pe.Exact(micro_batches=MICRO_BATCHES)
        self.sync = pe.GradSync(self.model, accumulate=MICRO_BATCHES, accumulator=exact)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def window(self, *, dealt: bool) -> tuple[float, int]:
        """Return seconds of one window, over all ranks, and this rank's micro-batches in it."""
        dist.barrier()
        start, taken = time.perf_counter(), 0
        for window in self.sync.windows(self.dealer if dealt else enumerate(self.sampler)):
            for _, rows in window:
                begin = time.perf_counter()
                self.sync.backward(self.model(self.data[rows]))
                time.sleep((self.slowdown - 1) * (time.perf_counter() - begin))
                taken += 1
            self.sync.step(self.optimizer)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item(), taken


def work(slowdown: float, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Measure on one worker."""
    torch.set_num_threads(1)
    rank = _Rank(slowdown)
    times: dict[str, list[tuple[float, int]]] = {"fixed": [], "dealt": []}
    for _ in range(rounds + 2):
        for name, taken in times.items():
            taken.append(rank.window(dealt=name == "dealt"))
    return {name: taken[2:] for name, taken in times.items()}


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the last worker")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-dealer.json")
    options = parser.parse_args()
    by_rank = launch(work, workers=options.workers, args=(options.slowdown, options.rounds))
    rows = {}
    for name in ("fixed", "dealt"):
        seconds = [second for second, _ in by_rank[0][name]]
        shares = [statistics.median(taken for _, taken in rank[name]) for rank in by_rank]
        rows[name] = {
            "p50_ms": statistics.median(seconds) * 1e3,
            "min_ms": min(seconds) * 1e3,
            "micro_batches_by_rank": shares,
        }
        print(
            f"{name}: median {rows[name]['p50_ms']:.0f} ms, min {rows[name]['min_ms']:.0f} ms, shares "
            f"{shares}"
        )
    if options.save:
        print("wrote", save("dealer", {"machine": card(1), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
