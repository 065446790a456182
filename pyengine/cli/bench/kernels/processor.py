"""The kernels of every op, held against torch's expressions and against the memory's own rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyengine.cli.bench.kernels import accumulate, codec, exact, pack, unscale_norm
from pyengine.cli.bench.kernels.case import Build, Sizes
from pyengine.cli.bench.timing import measure, percentile

# By stem.
OPS: Mapping[str, Callable[[Sizes], list[Build]]] = {
    "pack": pack.cases,
    "accumulate": accumulate.cases,
    "unscale_norm": unscale_norm.cases,
    "exact": exact.cases,
    "codec": codec.cases,
}


@dataclass(frozen=True)
class OnProcessor:
    """Measures cases on the processor, against the roofs of `measure_roofs`."""

    roofs: Mapping[str, float]
    seconds: float

    def measure(self, build: Build) -> dict[str, Any]:
        """Return the row of a result file.

        Raises:
            Disagreement: the contestants do not compute the same.
        """
        case = build()
        ours, theirs = measure([case.run, case.torch_run], self.seconds)
        best = min(ours)
        return {
            "case": case.name,
            "min_ms": best * 1e3,
            "p50_ms": statistics.median(ours) * 1e3,
            "p99_ms": percentile(ours, 0.99) * 1e3,
            "torch_min_ms": min(theirs) * 1e3,
            "torch_p50_ms": statistics.median(theirs) * 1e3,
            "gb_per_s": case.num_bytes / best / 1e9,
            "roof": case.roof,
            "times_roof": best / case.roof_seconds(self.roofs),
            "times_torch": min(theirs) / best,
            "rounds": len(ours),
        }
