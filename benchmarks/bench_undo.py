"""Measure a step that can be undone on the device: python benchmarks/bench_undo.py [--device cuda] [--save].

Three ways to step SGD with momentum take turns: `waits` reads the flag on the host; `keep` and `skip` leave
it on the device, which keeps the step or undoes it. `host` is the time until the call returns, `all` the
time until the device is done.
"""

import argparse
import statistics
import time

import torch
from _harness import save
from torch import nn

from pyengine.cli.machine import card
from pyengine.step.stepper import PlainStepper, allocate, undoing

SHAPES = {"1000 small": [(64,)] * 1000, "12 of 1 M": [(1024, 1024)] * 12}


class _Case:
    """One list of parameters under SGD with momentum, whose state is there."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self.device, self.stepper = device, PlainStepper()
        self.params = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        self.optimizer = torch.optim.SGD(self.params, lr=1e-9, momentum=0.9, foreach=True)
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.flags = {"keep": torch.zeros((), device=device), "skip": torch.ones((), device=device)}

    def step(self, way: str) -> None:
        """Step in one of the three ways."""
        if way == "waits":
            if not bool(self.flags["keep"]):
                self.optimizer.step()
            return
        targets = self.stepper.targets(self.optimizer)
        assert targets is not None
        copies = allocate(targets)
        assert copies is not None
        with undoing(targets, copies, self.flags[way]):
            self.optimizer.step()

    def seconds(self, way: str) -> tuple[float, float]:
        """Return seconds of the host's call, and until the device is done."""
        self._wait()
        start = time.perf_counter()
        self.step(way)
        host = time.perf_counter() - start
        self._wait()
        return host, time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-undo.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, shapes in SHAPES.items():
        case = _Case(shapes, options.device)
        times: dict[str, list[tuple[float, float]]] = {"waits": [], "keep": [], "skip": []}
        for _ in range(options.rounds + 5):
            for way, taken in times.items():
                taken.append(case.seconds(way))
        for way, taken in times.items():
            host, whole = zip(*taken[5:], strict=True)
            row = {"case": name, "way": way}
            row |= {"host_ms": statistics.median(host) * 1e3, "host_min_ms": min(host) * 1e3}
            row |= {"all_ms": statistics.median(whole) * 1e3, "all_min_ms": min(whole) * 1e3}
            rows.append(row)
            print(f"{name:12} {way:6} host {row['host_ms']:7.3f} ms (min {row['host_min_ms']:7.3f}), "
                  f"all {row['all_ms']:7.3f} ms (min {row['all_min_ms']:7.3f})")  # fmt: skip
    if options.save:
        print("wrote", save("undo", {"machine": card(1), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
