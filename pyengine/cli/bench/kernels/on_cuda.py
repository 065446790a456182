"""Cases on a CUDA device: more contestants, the copy rate and the launch floor, rotating operands."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.cli.bench.kernels import cuda
from pyengine.cli.bench.kernels.case import Build
from pyengine.cli.bench.timing import Run, percentile

OURS, COPY = "pyengine", "copy_ of as many bytes"


@dataclass(frozen=True)
class Yardstick:
    """What the times of a CUDA run are held against, measured in the same run."""

    copy_gb_per_s: float
    floor_queued_us: float
    floor_idle_us: float


@dataclass(frozen=True)
class OnCuda:
    """Measures cases on the CUDA device."""

    yardstick: Yardstick
    seconds: float

    def measure(self, build: Build) -> dict[str, Any]:
        """Return the row of a result file.

        Raises:
            Disagreement: the contestants do not compute the same.
        """
        name, num_bytes, sets = _build_sets(build)
        return row(name, num_bytes, compete(sets, self.seconds), self.yardstick)


def measure_yardstick(megabytes: int, seconds: float) -> Yardstick:
    """Measure the copy rate of large buffers and the time of a launch that does nothing."""
    num_bytes = 8 * megabytes * 2**20
    copies, fill = [cuda.copier(num_bytes) for _ in range(2)], cuda.filler()
    copy = cuda.measure([cuda.Queued(cuda.rotate([{COPY: run} for run in copies])[COPY])], seconds)
    floors = cuda.measure([cuda.Queued(fill), cuda.Idle(fill)], seconds / 2)
    queued, idle = (statistics.median(times) * 1e6 for times in floors)
    return Yardstick(num_bytes / statistics.median(copy[0]) / 1e9, queued, idle)


def compete(sets: Sequence[Mapping[str, Run]], seconds: float) -> dict[str, dict[str, float | bool]]:
    """Let contestants take turns over rotating sets; return each one's times on the device and from an idle
    stream.
    """
    runs = cuda.rotate(sets)
    for _ in sets:
        for run in runs.values():
            run()
    queued = {name: cuda.Queued(run) for name, run in runs.items()}
    device = cuda.measure(list(queued.values()), 0.7 * seconds)
    idle = cuda.measure([cuda.Idle(run) for run in runs.values()], 0.3 * seconds)
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


def row(
    name: str, num_bytes: int, times: dict[str, dict[str, float | bool]], yardstick: Yardstick
) -> dict[str, Any]:
    """Return a case's row of a result file: `contestants` by name,
    each with its rate for the job's `num_bytes`.
    """
    for mine in times.values():
        mine["gb_per_s"] = num_bytes / mine["p50_us"] / 1e3
        mine["share_of_copy"] = mine["gb_per_s"] / yardstick.copy_gb_per_s
        mine["above_floor_us"] = mine["p50_us"] - yardstick.floor_queued_us
        mine["idle_above_floor_us"] = mine["idle_p50_us"] - yardstick.floor_idle_us
    return {"case": name, "num_bytes": num_bytes, "contestants": times}


def _build_sets(build: Build) -> tuple[str, int, list[dict[str, Run]]]:
    first = build()
    cases = [first, *(build() for _ in range(cuda.num_sets(first.num_bytes) - 1))]
    sets = [
        {OURS: case.run, "torch": case.torch_run, **case.others, COPY: cuda.copier(case.num_bytes)}
        for case in cases
    ]
    return first.name, first.num_bytes, sets
