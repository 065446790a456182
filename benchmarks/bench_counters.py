"""One call of every kernel over large tensors, for a profiler to look into: benchmarks/gpu.py starts it
under ncu.

Cases are those of the kernels' benchmarks, each checked against torch first, and only what is in between
`cudaProfilerStart` and `cudaProfilerStop` counts.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import _cuda
import torch

from pyengine.cli.bench.kernels.case import Build, Sizes
from pyengine.cli.bench.kernels.measure import OPS
from pyengine.cli.machine import card

# In the names of cases: those of many or small tensors, and of other sizes than the large one.
_OTHERS = ("400", "1000", "MiB")


def large(sizes: Sizes) -> dict[str, Build]:
    """Return the cases of a few large tensors by name."""
    builds = {_name(build): build for op in OPS for build in _cuda.cases(op, sizes)}
    return {name: build for name, build in builds.items() if not any(part in name for part in _OTHERS)}


def _name(build: Build) -> str:
    assert isinstance(build, partial)
    return str(build.args[0])


def _counted(device: str) -> AbstractContextManager[None]:
    return torch.cuda.profiler.profile() if device == "cuda" else nullcontext()


def main() -> None:
    """Run each case once, and write their names down in that order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--megabytes", type=int, default=512, help="of float32 in a case: 512 are 2^27 elements"
    )
    parser.add_argument("--cases", type=Path, help="file for their names")
    options = parser.parse_args()
    done: list[str] = []
    for name, build in large(Sizes(options.megabytes, options.device)).items():
        case = build()
        if options.device == "cuda":
            torch.cuda.synchronize()
        with _counted(options.device):
            case.run()
            if options.device == "cuda":
                torch.cuda.synchronize()
        done.append(name)
        if options.cases:  # now: a run that is stopped keeps what it has
            machine = card(1) | (_cuda.machine_card() if options.device == "cuda" else {})
            content = {"machine": machine, "megabytes": options.megabytes, "cases": done}
            options.cases.write_text(json.dumps(content))
        print(name, flush=True)
    print(f"{len(done)} cases")


if __name__ == "__main__":
    main()
