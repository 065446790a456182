"""The arguments and settings of `bench`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from pyengine.cli.arguments import Conflict, check_workers, check_writable, counts, different_names
from pyengine.cli.bench.device import DEVICES
from pyengine.cli.bench.measure import DTYPES, Setting
from pyengine.cli.bench.models import MICRO_BATCHES, MODELS
from pyengine.cli.bench.variants import VARIANTS
from pyengine.wire.named import WIRES

# Variants with each wire; for example, `engine_int8_ef` is `engine` with the wire `int8-ef`.
_OVER_WIRES = {f"{kind}_{wire.replace('-', '_')}" for kind in ("engine", "attach") for wire in WIRES}

DESCRIPTION = """\
Train whole windows (forward, backward, sync, unscale, clip, optimizer) with pyengine, with DDP and, if
installed, with Accelerate, on real worker processes of this machine. All variants must compute the same
values. They take turns, so that whatever slows the machine down slows all of them down. This takes about a
minute on two idle cores."""

EXAMPLES = (
    """\
examples:
  python -m pyengine bench                                   windows of a GPT on 2 workers
  python -m pyengine bench --model small0                    1000 small parameters, no computation
  python -m pyengine bench --workers 4 --rounds 20           more ranks, less noise
  python -m pyengine bench --variants ddp,no_sync,engine,attach
  python -m pyengine bench --device cuda --model gpt124 --dtype bf16
                                                             windows on GPUs, one rank per GPU, over NCCL
  python -m pyengine bench --json --out mine.json            JSON lines, and a result file

models:
  gpt, gpt100    GPTs with 17.4 M parameters, and with 100 MB of fp32 gradients
  gpt124         a GPT of GPT-2's size, 124 M parameters; for a GPU
  gpt124-short   gpt124 with shorter micro-batches
  gpt124-long    gpt124 with longer micro-batches, compiled; fp32 runs under autocast to bf16
  small          500 linear layers of width 64: 1000 small parameters
  gpt0, small0   the same parameters, with a backward that computes nothing

variants:
"""
    + "".join(
        f"  {name:<20}{variant.label}\n" for name, variant in VARIANTS.items() if name not in _OVER_WIRES
    )
    + """  engine_bf16, attach_bf16 and so on: the same with every other wire of `train`
"""
    + """
columns:
  median, min    milliseconds per window on the slowest worker; on CUDA, between two events
  spread         largest minus smallest window, divided by the median: the noise of the machine
  sync           median time above that of a window without any communication, and its share of the window

exit code: 0 measured, 1 a worker or a variant failed, or variants disagree, 2 wrong arguments
"""
)

_REMOVED = {
    "step": "`bench` measures nothing but windows: leave it out",
    "kernels": "in a clone, `python benchmarks/bench_kernels.py pack accumulate` measures kernels",
}
_USUAL = ("floor", "ddp", "no_sync", "no_sync_view", "accelerate", "engine", "engine_bf16", "attach")


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a benchmark: one `Setting` per model, the number of workers, and the result file."""

    cases: tuple[Setting, ...]
    workers: int
    json: bool
    out: Path | None


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    add("part", nargs="?", help=argparse.SUPPRESS)
    count("--workers", help="worker processes, one rank each (default: 2; on CUDA, one per device)")
    models = different_names(MODELS)
    add("--model", type=models, default=("gpt",), metavar="A,B", help="models, in turn (default: gpt)")
    add(
        "--dtype",
        choices=tuple(DTYPES),
        default="fp32",
        help="dtype of the parameters (default: fp32); fp16 is fp32 under autocast",
    )
    usual = ",".join(filter(_is_installed, _USUAL))
    names = different_names(VARIANTS)
    add("--variants", type=names, metavar="A,B", help=f"what to train with (default: {usual})")
    counts(parser, least=3)("--rounds", default=5, help="windows of each variant (default: 5)")
    count("--accumulate", default=MICRO_BATCHES, help="micro-batches per window (default: 8)")
    add("--device", choices=tuple(DEVICES), default="cpu", help="where to measure (default: cpu)")
    add("--out", type=Path, metavar="FILE", help="write a result file like those in benchmarks/results")


def settings(options: argparse.Namespace) -> BenchSettings:
    """Return the settings; raise `Conflict` if arguments conflict with each other or with this machine."""
    if options.part is not None:
        why = _REMOVED.get(options.part, "`bench` accepts only arguments that begin with --")
        raise Conflict(f"argument {options.part}: {why}")
    if options.out is not None:
        check_writable("--out", options.out)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Conflict("argument --device: got cuda, but torch finds no CUDA device: use cpu")
    variants = options.variants or tuple(filter(_is_installed, _USUAL))
    if missing := [name for name in variants if not _is_installed(name)]:
        needs = " and ".join(str(VARIANTS[name].needs) for name in missing)
        raise Conflict(
            f"argument --variants: got {','.join(missing)}, but {needs} is not installed: install it, or "
            "leave it out"
        )
    cases = tuple(
        Setting(
            model,
            options.dtype,
            variants,
            options.rounds,
            device=options.device,
            micro_batches=options.accumulate,
        )
        for model in options.model
    )
    return BenchSettings(cases, _workers(options), options.json, options.out)


def _workers(options: argparse.Namespace) -> int:
    """Return the number of workers; on CUDA at most one per device."""
    if options.device == "cpu":
        workers = options.workers or 2
        check_workers([workers])
        return workers
    found = torch.cuda.device_count()
    workers = options.workers or found
    if workers > found:
        raise Conflict(
            f"argument --workers: got {workers} with --device cuda, but NCCL needs one device per "
            f"worker: expected at most {found}, the number of devices"
        )
    return workers


def _is_installed(name: str) -> bool:
    """Return whether the package that a variant needs is installed."""
    package = VARIANTS[name].needs
    return package is None or find_spec(package) is not None
