"""The arguments of `bench`, and its settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyengine.cli.arguments import (
    Conflict,
    above_zero,
    check_absent,
    check_workers,
    check_writable,
    counts,
    different_names,
)
from pyengine.cli.bench.kernels.case import Sizes
from pyengine.cli.bench.kernels.measure import OPS
from pyengine.cli.bench.windows.measure import DTYPES, Setting
from pyengine.cli.bench.windows.models import MICRO_BATCHES, MODELS
from pyengine.cli.bench.windows.variants import VARIANTS
from pyengine.wire.named import WIRES

# Their names say what they are: engine_int8_ef is `engine` over the wire int8-ef.
_OVER_WIRES = {f"{kind}_{wire.replace('-', '_')}" for kind in ("engine", "attach") for wire in WIRES}

DESCRIPTION = """\
Compare pyengine with plain PyTorch on this machine: `kernels` with torch's expressions and the rate of the
memory, `step` (whole windows: forward, backward, sync, unscale, clip, optimizer) with DDP and, if installed,
Accelerate, on real worker processes. All contestants must compute the same values; then they take turns, so
that whatever slows the machine down slows all of them down. Both parts take about two minutes on two idle
cores."""

EXAMPLES = (
    """\
examples:
  python -m pyengine bench                                   every kernel, then windows of a GPT on 2 workers
  python -m pyengine bench step --model small0               1000 small parameters, no computation
  python -m pyengine bench step --workers 4 --rounds 20      more ranks, less noise
  python -m pyengine bench step --variants ddp,no_sync,engine,attach
  python -m pyengine bench kernels --ops pack --megabytes 8  sizes that fit into the caches
  python -m pyengine bench kernels --device cuda             the kernels on the GPU
  python -m pyengine bench step --device cuda --model gpt124 --dtype bf16
                                                             windows on GPUs, a rank a GPU over NCCL
  python -m pyengine bench --json --out mine.json            JSON lines, and a result file

models:
  gpt, gpt100    a GPT with 17.4 M parameters; with 100 MB of fp32 gradients
  gpt124         a GPT of GPT-2's size, 124 M parameters; for a GPU
  gpt124-short   with shorter micro-batches; -long with longer ones, compiled, fp32 under autocast to bf16
  small          500 linear layers of 64: 1000 small parameters
  gpt0, small0   the same parameters, with a backward that computes nothing

variants:
"""
    + "".join(
        f"  {name:<20}{variant.label}\n" for name, variant in VARIANTS.items() if name not in _OVER_WIRES
    )
    + """  engine_bf16, attach_bf16 and so on: the same over every other wire of `train`
"""
    + """
columns:
  median, min    milliseconds a window, of the slowest worker; on CUDA between two events
  spread         largest minus smallest window, over the median: the noise of the machine
  sync           median time above that of a window without any communication; and its share of the window
  x roof         time of the kernel over the time of the memory traffic alone (on CUDA that of a large copy);
                 sizes that fit into the caches can be below 1
  x torch        times faster than torch's expression of the same work

exit code: 0 measured, 1 a worker or a variant failed, or contestants disagree, 2 wrong arguments
"""
)

PARTS = ("step", "kernels")


def _is_installed(name: str) -> bool:
    """Return whether the package that a variant needs is installed."""
    package = VARIANTS[name].needs
    return package is None or find_spec(package) is not None


_USUAL = ("floor", "ddp", "no_sync", "no_sync_view", "accelerate", "engine", "engine_bf16", "attach")
_DEFAULT_VARIANTS = tuple(filter(_is_installed, _USUAL))
_MEGABYTES = {"cpu": 64, "cuda": 256}
# The arguments of each part, and their defaults.
_OF_STEP: dict[str, Any] = {
    "workers": None,
    "model": "gpt",
    "dtype": "fp32",
    "variants": _DEFAULT_VARIANTS,
    "rounds": 5,
    "accumulate": MICRO_BATCHES,
}
_OF_KERNELS: dict[str, Any] = {"ops": tuple(OPS), "seconds": 0.3, "megabytes": None}


@dataclass(frozen=True)
class Steps:
    """Windows to measure on workers."""

    workers: int
    setting: Setting


@dataclass(frozen=True)
class Kernels:
    """Kernels to measure, with a time budget for each case."""

    ops: tuple[str, ...]
    sizes: Sizes
    seconds: float


@dataclass(frozen=True)
class Settings:
    """What to measure, and the result file to write; a part that is None is left out."""

    steps: Steps | None
    kernels: Kernels | None
    json: bool
    out: Path | None


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    add("part", nargs="?", choices=PARTS, help="the part to measure (default: both)")
    count("--workers", help="of step: worker processes, one rank each (default: 2, on CUDA one a device)")
    add("--model", choices=MODELS, help="of step: the model (default: gpt)")
    add(
        "--dtype",
        choices=tuple(DTYPES),
        help="of step: dtype of the parameters (default: fp32); fp16: fp32 under autocast",
    )
    add(
        "--variants",
        type=different_names(VARIANTS),
        metavar="A,B",
        help=f"of step: what to train with (default: {','.join(_DEFAULT_VARIANTS)})",
    )
    counts(parser, least=3)("--rounds", help="of step: windows of each variant (default: 5)")
    count("--accumulate", help="of step: micro-batches a window (default: 8)")
    ops = f"of kernels: the ops (default: {','.join(OPS)})"
    add("--ops", type=different_names(OPS), metavar="A,B", help=ops)
    add("--seconds", type=above_zero, metavar="X", help="of kernels: time budget of a case (default: 0.3)")
    count("--megabytes", help="of kernels: MiB of fp32 in a large case (default: 64, on CUDA 256)")
    add("--device", choices=tuple(_MEGABYTES), default="cpu", help="where to measure (default: cpu)")
    add("--out", type=Path, metavar="FILE", help="write a result file like those of benchmarks/results")


def settings(options: argparse.Namespace) -> Settings:
    """Return the settings; raise `Conflict` if arguments do not fit together or this machine."""
    device = options.device
    if options.out is not None:
        check_writable("--out", options.out)
    of_step, of_kernels = _values(options, "step", _OF_STEP), _values(options, "kernels", _OF_KERNELS)
    if device == "cuda" and not torch.cuda.is_available():
        raise Conflict("argument --device: got cuda, and torch finds no CUDA device: need cpu")
    kernels = None
    if of_kernels:
        sizes = Sizes(of_kernels["megabytes"] or _MEGABYTES[device], device)
        kernels = Kernels(of_kernels["ops"], sizes, of_kernels["seconds"])
    return Settings(_steps(of_step, device) if of_step else None, kernels, options.json, options.out)


def _values(options: argparse.Namespace, part: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a part; none if it is left out."""
    if options.part in (part, None):
        return defaults | {name: got for name in defaults if (got := getattr(options, name)) is not None}
    for name in defaults:
        check_absent(
            options,
            name,
            f"with {options.part}, and it is an argument of {part}: leave one of them out",
        )
    return {}


def _steps(values: dict[str, Any], device: str) -> Steps:
    if missing := [name for name in values["variants"] if not _is_installed(name)]:
        needs = " and ".join(str(VARIANTS[name].needs) for name in missing)
        raise Conflict(
            f"argument --variants: got {','.join(missing)}, and {needs} is not installed: install it, or "
            "leave it out"
        )
    setting = Setting(
        values["model"],
        values["dtype"],
        values["variants"],
        values["rounds"],
        device=device,
        micro_batches=values["accumulate"],
    )
    found = torch.cuda.device_count() if device == "cuda" else 2
    workers = values["workers"] or found
    if device == "cpu":
        check_workers([workers])
    elif workers > found:
        raise Conflict(
            f"argument --workers: got {workers} with --device cuda, and NCCL needs a device each: "
            f"need at most {found}, the number of devices"
        )
    return Steps(workers, setting)
