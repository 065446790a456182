"""Measure the host time of each phase of a window: python benchmarks/bench_host.py [--save].

The model is a chain of linear layers of width 8, so nearly all of the time is host time (Python, autograd and
launches). Variants take turns window by window in the same processes. `control` is `no_sync_view` once more;
the difference between the two is noise. `floor` runs the collectives of a window by hand. With --device cuda
there is one NCCL rank, and a phase ends when its calls have returned. On the CPU there are two gloo ranks
with one thread each, and each phase includes the time that it waits for the other rank. `making` is the time
of a constructor alone (DDP or an engine), or of `attach` to an existing DDP model.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from _harness import save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.cli.machine import card

PHASES = ("begin", "forward", "early", "last", "clip", "step")
WIDTH, ROWS, WARM_UP = 8, 2, 4


class Raw:
    """A loop without communication."""

    def __init__(self, num_params: int, accumulate: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_params // 2)]).to(device)
        self.forward: nn.Module = self.model
        self.batches = torch.randn(accumulate, ROWS, WIDTH, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.wrap()

    def wrap(self) -> None:
        """Wrap the model."""

    def window(self) -> dict[str, float]:
        """Train one window; return seconds by phase."""
        taken: dict[str, float] = defaultdict(float)
        last = len(self.batches) - 1
        for index, x in enumerate(self.batches):
            with self.context(is_last=index == last):
                start = time.perf_counter()
                loss = self.forward(x).sum()
                taken["forward"] += time.perf_counter() - start
                start = time.perf_counter()
                (loss / len(self.batches)).backward()
                taken["last" if index == last else "early"] += time.perf_counter() - start
        start = time.perf_counter()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        taken["clip"] = time.perf_counter() - start
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken["step"] = time.perf_counter() - start
        return taken

    def context(self, *, is_last: bool):
        return nullcontext()


class NoSync(Raw):
    """DDP with `no_sync` on all but the last micro-batch."""

    has_views = False

    def wrap(self) -> None:
        self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=self.has_views)

    def context(self, *, is_last: bool):
        return nullcontext() if is_last else self.forward.no_sync()


class NoSyncView(NoSync):
    """`NoSync` with gradients that are views of DDP's buckets."""

    has_views = True


class Floor(Raw):
    """The two collectives of a window by hand, without any check.

    The all-gather of a header of 184 bytes is launched before the last backward. When it has completed, the
    gradients are sent as one vector.
    """

    def wrap(self) -> None:
        params = list(self.model.parameters())
        self.flat = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
        for param, part in zip(params, self.flat.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param)
        self.header = torch.ones(23, dtype=torch.float64, device=self.flat.device)
        self.headers, self.flats = (
            [torch.empty_like(each) for _ in range(dist.get_world_size())]
            for each in (self.header, self.flat)
        )

    def window(self) -> dict[str, float]:
        taken: dict[str, float] = defaultdict(float)
        last = len(self.batches) - 1
        for index, x in enumerate(self.batches):
            start = time.perf_counter()
            loss = self.forward(x).sum()
            taken["forward"] += time.perf_counter() - start
            start = time.perf_counter()
            if index == last:
                work = dist.all_gather(self.headers, self.header, async_op=True)
            loss.backward()
            if index == last:
                work.wait()
                total = sum(self.headers)[0]
                dist.all_gather(self.flats, self.flat)
                torch.sum(torch.stack(self.flats), 0, out=self.flat)
                self.flat.div_(total)
            taken["last" if index == last else "early"] += time.perf_counter() - start
        start = time.perf_counter()
        norm = torch.linalg.vector_norm(self.flat)
        self.flat.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        taken["clip"] = time.perf_counter() - start
        start = time.perf_counter()
        self.optimizer.step()
        self.flat.zero_()
        taken["step"] = time.perf_counter() - start
        return taken


class Engine(Raw):
    """`pe.GradSync`, in one long loop over its windows."""

    def wrap(self) -> None:
        self.sync = self.make()
        self.windows = self.sync.windows(self._stream())

    def make(self) -> pe.Sync:
        return pe.GradSync(self.model, accumulate=len(self.batches))

    def _stream(self):
        while True:
            yield from self.batches

    def window(self) -> dict[str, float]:
        taken: dict[str, float] = defaultdict(float)
        start = time.perf_counter()
        window = iter(next(self.windows))
        for index in range(len(self.batches)):
            x = next(window)
            taken["begin"] += time.perf_counter() - start
            start = time.perf_counter()
            loss = self.forward(x).sum()
            taken["forward"] += time.perf_counter() - start
            start = time.perf_counter()
            self.sync.backward(loss, count=len(x))
            taken["last" if index == len(self.batches) - 1 else "early"] += time.perf_counter() - start
            start = time.perf_counter()
        next(window, None)
        taken["begin"] += time.perf_counter() - start
        start = time.perf_counter()
        self.sync.clip_grad_norm_(1.0)
        taken["clip"] = time.perf_counter() - start
        start = time.perf_counter()
        self.sync.step(self.optimizer)
        taken["step"] = time.perf_counter() - start
        return taken


class Attach(Engine):
    """`pe.attach` to DDP."""

    def make(self) -> pe.Sync:
        self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        return pe.attach(self.forward, accumulate=len(self.batches))


VARIANTS = {
    "raw": Raw, "floor": Floor, "no_sync": NoSync, "no_sync_view": NoSyncView, "control": NoSyncView,
    "engine": Engine, "attach": Attach,
}  # fmt: skip


def measure(num_params: int, accumulate: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Return, by variant, the min and median milliseconds of each phase and of the window on this rank."""
    torch.set_num_threads(1)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    made = {name: variant(num_params, accumulate, where) for name, variant in VARIANTS.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for number in range(rounds + WARM_UP):
        names = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in names:
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            phases = made[name].window()
            taken[name].append(
                {phase: phases.get(phase, 0.0) for phase in PHASES} | {"window": sum(phases.values())}
            )
    return {name: _summary(windows[WARM_UP:]) for name, windows in taken.items()}


def measure_making(num_params: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the min and median milliseconds of each constructor on this rank, by variant."""
    torch.set_num_threads(1)
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds + 1):
        models = [Raw(num_params, 1, torch.device("cpu")).model for _ in range(4)]
        ddp = DistributedDataParallel(models[3], gradient_as_bucket_view=True)
        makers = {
            "ddp": partial(DistributedDataParallel, models[0], gradient_as_bucket_view=True),
            "control": partial(DistributedDataParallel, models[1], gradient_as_bucket_view=True),
            "engine": partial(pe.GradSync, models[2], accumulate=1),
            "attach": partial(pe.attach, ddp, accumulate=1),
        }
        for name, make in makers.items():
            dist.barrier()
            start = time.perf_counter()
            made = make()
            taken[name].append({"making": time.perf_counter() - start})
            if isinstance(made, pe.Sync):
                made.close()
    return {name: _summary(rows[1:], ("making",)) for name, rows in taken.items()}


def _summary(
    windows: list[dict[str, float]], phases: Sequence[str] = (*PHASES, "window")
) -> dict[str, float]:
    row = {}
    for phase in phases:
        values = [1e3 * window[phase] for window in windows]
        row |= {f"{phase}_min_ms": min(values), f"{phase}_p50_ms": statistics.median(values)}
    return row


def _on_nccl(*case: int) -> list[dict[str, dict[str, float]]]:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        return [measure(*case, "cuda")]
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run the benchmark, print its results, and save them if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", default="10,120,1000")
    parser.add_argument("--accumulate", default="1,8")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="write results/<date>-host[-cuda].json")
    options = parser.parse_args()
    cases = {}
    if options.device == "cpu":
        making = pe.launch(measure_making, workers=2, args=(100, options.rounds))[0]
        cases["making, 100 parameters"] = making
        for name, row in making.items():
            times = [f"{row[key]:9.3f} ({row[key] / making['ddp'][key]:5.2f})" for key in row]
            print(f"making, 100 parameters: {name:14}{' '.join(times)}")
    for num_params in map(int, options.parameters.split(",")):
        for accumulate in map(int, options.accumulate.split(",")):
            case = (num_params, accumulate, options.rounds)
            is_cpu = options.device == "cpu"
            found = pe.launch(measure, workers=2, args=(*case, "cpu"))[0] if is_cpu else _on_nccl(*case)[0]
            cases[f"{num_params} parameters, A = {accumulate}"] = found
            _print(f"{num_params} parameters, A = {accumulate}", found)
    if options.save:
        machine = card(1) | {"device": options.device}
        name = "host" if options.device == "cpu" else "host-cuda"
        print("wrote", save(name, {"machine": machine, "options": vars(options), "cases": cases}))


def _print(case: str, found: dict[str, dict[str, float]]) -> None:
    print(f"{case}: minimum ms (x DDP + no_sync with views)")
    print(f"  {'':14}" + "".join(f"{phase:>9}" for phase in PHASES) + f"{'window':>17}{'median':>17}")
    peer = found["no_sync_view"]
    for name, row in found.items():
        phases = "".join(f"{row[f'{phase}_min_ms']:9.3f}" for phase in PHASES)
        whole = [
            f"{row[key]:9.3f} ({row[key] / peer[key]:5.2f})" for key in ("window_min_ms", "window_p50_ms")
        ]
        print(f"  {name:14}{phases} {' '.join(whole)}", flush=True)


if __name__ == "__main__":
    main()
