"""The arguments of `bench`, and the settings they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pyengine.cli.arguments import Conflict, check_workers, check_writable, finite_above_zero, whole
from pyengine.cli.bench.kernels.case import Sizes
from pyengine.cli.bench.kernels.processor import OPS
from pyengine.cli.bench.windows.measure import DTYPES, Setting
from pyengine.cli.bench.windows.models import MICRO_BATCHES, MODELS
from pyengine.cli.bench.windows.variants import BY_NAME, VARIANTS

DESCRIPTION = """\
Measure on this machine what pyengine buys: `kernels` against torch's expressions and against the rate of the
memory, `step` (whole windows: forward, backward, sync, unscale, clip, optimizer) against DDP and its friends,
on real workers. Contestants are checked to compute the same, then take turns, so that a change of the
machine's mood hits all of them. Both together take about two minutes on two idle cores."""

EXAMPLES = (
    """\
examples:
  python -m pyengine bench                                   every kernel, then windows of a GPT on 2 workers
  python -m pyengine bench step --model small0               1000 small parameters: only the machinery
  python -m pyengine bench step --workers 4 --rounds 20      more ranks, and less noise
  python -m pyengine bench step --variants ddp,no_sync,engine,attach
  python -m pyengine bench kernels --ops pack --megabytes 8  what fits into the caches
  python -m pyengine bench kernels --device cuda             the kernels on the GPU
  python -m pyengine bench step --device cuda --model gpt124 --dtype bf16 --graph
                                                             windows there, a rank a GPU over NCCL
  python -m pyengine bench --json --out mine.json            one JSON object a line, and a result file

models:
  gpt, gpt100    a GPT with 17.4 M parameters; with 100 MB of fp32 gradients
  gpt124         a GPT of GPT-2's size, 124 M parameters; for a GPU
  small          500 linear layers of 64: 1000 small parameters
  gpt0, small0   the same parameters with gradients that are there already: only the machinery is timed

variants:
"""
    + "".join(f"  {name:<20}{variant.label}\n" for name, variant in BY_NAME.items())
    + """  engine_bf16 and so on, attach_bf16 and so on: the same over every other wire of `train`
"""
    + """
columns:
  median, min    milliseconds a window, of the slowest worker
  spread         largest minus smallest over the median: how restless the machine was; the sentences at the
                 end say which orders are clear all the same
  sync           what it costs above no communication at all, in the median; and its share of the window
  host           on CUDA: milliseconds until the host has queued a window that found the device idle
  calls          on CUDA: kernels launched, copies and fills, and waits for the device, a window
  peak           on CUDA: MB of tensors at most, less what other variants hold
  graph          with --graph: milliseconds a window as one CUDA graph, or why it is none
  x roof         time over that of the memory for as many bytes: 1 is the roof (on CUDA that of a large copy),
                 which what fits into caches beats
  x torch        times faster than torch's expression of the same work

exit code: 0 measured, 1 a worker or a variant failed or contestants disagree, 2 the arguments are wrong
"""
)

PARTS = ("step", "kernels")
_DEFAULT_VARIANTS = (
    "floor",
    "ddp",
    "no_sync",
    "no_sync_view",
    "accelerate",
    "engine",
    "engine_bf16",
    "attach",
)
# On CUDA with what is worth most first; it is the order of the table.
_CUDA_VARIANTS = (
    *("engine", "no_sync_view", "engine_bf16", "attach", "no_sync_bf16", "accelerate", "floor", "by_hand"),
)
_MEGABYTES = {"cpu": 64, "cuda": 256}
# By part: argument, and what it is when not given.
_OF_STEP: dict[str, Any] = {
    "workers": None,
    "model": "gpt",
    "dtype": "fp32",
    "variants": None,
    "rounds": 5,
    "accumulate": MICRO_BATCHES,
    "graph": False,
    "device": "cpu",
}
_OF_KERNELS: dict[str, Any] = {"ops": tuple(OPS), "seconds": 0.3, "megabytes": None, "device": "cpu"}


@dataclass(frozen=True)
class Steps:
    """Windows to measure.

    Attributes:
        left_out: variants of the default that are not installed.
        graph: whether windows are captured, too.
    """

    workers: int
    setting: Setting
    left_out: tuple[str, ...]
    graph: bool = False


@dataclass(frozen=True)
class Kernels:
    """Kernels to measure.

    Attributes:
        seconds: time budget of a case.
    """

    ops: tuple[str, ...]
    sizes: Sizes
    seconds: float


@dataclass(frozen=True)
class Settings:
    """What to measure; None leaves a part out.

    Attributes:
        json: print JSON lines instead of tables.
        out: result file to write, if any.
    """

    steps: Steps | None
    kernels: Kernels | None
    json: bool
    out: Path | None


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("part", nargs="?", choices=PARTS, help="measure only this (default: both)")
    add(
        "--workers",
        type=whole(1),
        metavar="N",
        help="of step: processes, one rank each (default: 2, on CUDA one a device)",
    )
    add("--model", choices=MODELS, help="of step (default: gpt)")
    add(
        "--dtype",
        choices=tuple(DTYPES),
        help="of step: type of the parameters (default: fp32); fp16: fp32 under autocast",
    )
    add(
        "--variants",
        type=_several(VARIANTS),
        metavar="A,B",
        help=f"of step (default: {','.join(_DEFAULT_VARIANTS)})",
    )
    add("--rounds", type=whole(3), metavar="N", help="of step: windows of each variant (default: 5)")
    add("--accumulate", type=whole(1), metavar="N", help="of step: micro-batches a window (default: 8)")
    add("--graph", action="store_true", default=None, help="of step: windows as CUDA graphs, too")
    add("--ops", type=_several(OPS), metavar="A,B", help=f"of kernels (default: {','.join(OPS)})")
    add(
        "--seconds",
        type=finite_above_zero,
        metavar="X",
        help="of kernels: time budget of a case (default: 0.3)",
    )
    add("--megabytes", type=whole(1), metavar="N", help="of kernels: of fp32 (default: 64, on CUDA 256)")
    add("--device", choices=tuple(_MEGABYTES), help="where to measure (default: cpu)")
    add("--json", action="store_true", help="one JSON object a line on stdout instead of tables")
    add("--out", type=Path, metavar="FILE", help="write a result file, as those of benchmarks/results")


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings.

    Raises:
        Conflict: an argument of the part that is left out, a variant or device that is not here, or a file
            that cannot be.
    """
    out: Path | None = options.out
    if out is not None:
        check_writable("--out", out)
    of_step, of_kernels = _values(options, "step", _OF_STEP), _values(options, "kernels", _OF_KERNELS)
    return Settings(
        steps=_steps(options, of_step) if of_step else None,
        kernels=_kernels(of_kernels) if of_kernels else None,
        json=options.json,
        out=out,
    )


def _values(options: argparse.Namespace, part: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a part; nothing if it is left out."""
    given = {name: getattr(options, name) for name in defaults if getattr(options, name) is not None}
    if options.part in (part, None):
        return defaults | given
    for name, value in given.items():
        if name in _OF_STEP and name in _OF_KERNELS:
            continue
        got = ",".join(value) if isinstance(value, tuple) else value
        raise Conflict(
            f"argument --{name}: got {got} with {options.part}, and it is an argument of {part}: leave one "
            "of the two out"
        )
    return {}


def _steps(options: argparse.Namespace, values: dict[str, Any]) -> Steps:
    device, variants = values["device"], values["variants"]
    _check_device(device)
    if variants is None:
        variants = _CUDA_VARIANTS if device == "cuda" else _DEFAULT_VARIANTS
    missing = tuple(name for name in variants if not _is_installed(name))
    if missing and options.variants is not None:
        needs = " and ".join(str(VARIANTS[name].needs) for name in missing)
        raise Conflict(
            f"argument --variants: got {','.join(missing)}, and {needs} is not installed here: install it, "
            "or leave it out"
        )
    setting = Setting(
        values["model"],
        values["dtype"],
        tuple(name for name in variants if name not in missing),
        values["rounds"],
        device=device,
        micro_batches=values["accumulate"],
    )
    return Steps(_workers(values["workers"], device), setting, missing, values["graph"])


def _workers(wanted: int | None, device: str) -> int:
    """Return how many ranks there are: over NCCL one a device."""
    if device == "cpu":
        workers = wanted or 2
        check_workers([workers])
        return workers
    found = torch.cuda.device_count()
    if wanted is not None and wanted > found:
        raise Conflict(
            f"argument --workers: got {wanted} with --device cuda, and NCCL needs a device each: "
            f"need at most {found}, which is how many there are"
        )
    return wanted or found


def _is_installed(variant: str) -> bool:
    needs = VARIANTS[variant].needs
    return needs is None or find_spec(needs) is not None


def _kernels(values: dict[str, Any]) -> Kernels:
    device = values["device"]
    _check_device(device)
    return Kernels(values["ops"], Sizes(values["megabytes"] or _MEGABYTES[device], device), values["seconds"])


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise Conflict("argument --device: got cuda, and torch finds no CUDA device here: need cpu")


def _several(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a type for `add_argument`: different names out of the known ones."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(known) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"got {text}, need different ones of {', '.join(known)}")
        return names

    return parse
