"""The arguments of `plan` about a network, and the settings they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pyengine.cli.arguments import Conflict, check_workers, check_writable, finite_above_zero, whole
from pyengine.cli.plan import calibration
from pyengine.cli.plan.calibration import Calibration
from pyengine.cli.plan.model import Speeds, Transport, Work
from pyengine.cli.wires import PLANNED

EXAMPLES = """\
  python -m pyengine plan --measure mine.json                what this machine can do, in a quarter minute
  python -m pyengine plan --link 0.1,1,10 --hosts 8,64,512,4096 --calibration mine.json
                                                             windows, exposed sync, wire and accumulation
  python -m pyengine plan --link 100 --hosts 64 --ranks-per-host 8 --params 7e9 --forward-ms 300 \\
      --backward-ms 600 --step-ms 40 --kernel-gb-s 1500      a model and a machine in numbers
"""

COLUMNS = """\
columns with --link (docs/network.md has the formulae):
  A             the fewest micro-batches a window of which the exposed sync is at most --share
  sync          first byte to last value, were there nothing else; limit: what takes longest of it
  exposed       what a window is longer for it: the last backward hides the rest
  window        A × (forward + backward) + exposed + step
"""

DEFAULT_WIRES = ("fp32", "bf16", "bf16-sum-fp32", "int8", "int8-ef")
_LATENCY_US = 50.0  # steps through sockets of a local network, of which nothing was measured
# Arguments that say nothing without a network, and what they are when not given.
_DEFAULTS: dict[str, Any] = {
    "hosts": (2, 4, 8),
    "ranks_per_host": 1,
    "calibration": None,
    "wires": DEFAULT_WIRES,
    "params": None,
    "forward_ms": None,
    "backward_ms": None,
    "step_ms": None,
    "bucket_mb": 25.0,
    "latency_us": None,
    "kernel_gb_s": None,
    "transport_gbit_s": None,
    "cores": None,
    "accumulate": None,
    "share": 0.05,
    "plot": None,
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Measure:
    """What to calibrate.

    Attributes:
        file: to write, absolute or not.
    """

    file: Path


@dataclass(frozen=True)
class Settings:
    """What to predict.

    Attributes:
        links: Gbit/s of a host.
        wires: by name.
        cores_per_rank: of a host's processor.
        accumulate: micro-batches a window; None for the fewest.
        share: of the window that may be exposed sync.
        plot: file for a picture, if any.
        json: print JSON lines instead of a table.
    """

    links: tuple[float, ...]
    hosts: tuple[int, ...]
    ranks_per_host: int
    wires: tuple[str, ...]
    work: Work
    speeds: Speeds
    cores_per_rank: float
    accumulate: int | None
    share: float
    plot: Path | None
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument_group("windows on a network").add_argument
    add("--link", type=_links, default=(), metavar="X,X", help="Gbit/s that a host can send")
    add("--hosts", type=_several(whole(1)), metavar="N,N", help="(default: 2,4,8)")
    add("--ranks-per-host", type=whole(1), metavar="N", help="which share its link (default: 1)")
    add("--calibration", type=Path, metavar="FILE", help="machine and model as --measure has found them")
    add("--measure", type=Path, metavar="FILE", help="calibrate this machine, with bench's GPT, into FILE")
    add("--params", type=_numel, metavar="N", help="gradient elements: 7e9, say")
    add("--forward-ms", type=finite_above_zero, metavar="X", help="of a micro-batch")
    add("--backward-ms", type=finite_above_zero, metavar="X", help="of a micro-batch")
    add("--step-ms", type=finite_above_zero, metavar="X", help="of the optimizer")
    add("--bucket-mb", type=finite_above_zero, metavar="X", help="MiB of a bucket (default: 25)")
    add("--latency-us", type=finite_above_zero, metavar="X", help=f"of a step (default: {_LATENCY_US:g})")
    add("--kernel-gb-s", type=finite_above_zero, metavar="X", help="of every kernel (default: 8)")
    add("--transport-gbit-s", type=finite_above_zero, metavar="X", help="a rank's most (default: any)")
    add("--cores", type=finite_above_zero, metavar="X", help="of a host (default: two a rank)")
    add("--wires", type=_wires, metavar="A,B", help=f"(default: {','.join(DEFAULT_WIRES)})")
    add("--accumulate", type=whole(1), metavar="N", help="micro-batches a window (default: the fewest)")
    add("--share", type=_share, metavar="X", help="exposed, of the window (default: 0.05)")
    add("--plot", type=Path, metavar="FILE.svg", help="draw windows of --accumulate over hosts")
    parser.set_defaults(**_DEFAULTS)


def is_given(options: argparse.Namespace) -> bool:
    """Whether anything about a network is asked for.

    Raises:
        Conflict: an argument about one was given, and no network.
    """
    if options.link or options.measure:
        return True
    for name, default in _DEFAULTS.items():
        if getattr(options, name) != default:
            raise Conflict(
                f"argument --{name.replace('_', '-')}: got it without --link, which says how fast hosts "
                "send: give it too"
            )
    return False


def settings(options: argparse.Namespace) -> Measure | Settings:
    """Turn parsed arguments into settings.

    Raises:
        Conflict: something that they need is missing, or a file that cannot be.
    """
    if options.measure is not None:
        return _measure(options)
    if options.plot is not None:
        if options.accumulate is None:
            raise Conflict(
                "argument --plot: need --accumulate N too: windows of different lengths cannot be compared"
            )
        check_writable("--plot", options.plot)
    found = calibration.read(options.calibration) if options.calibration else None
    ranks = options.ranks_per_host
    cores = options.cores or (found.cores if found else 2 * ranks)
    return Settings(
        links=options.link,
        hosts=options.hosts,
        ranks_per_host=ranks,
        wires=options.wires,
        work=_work(options, found),
        speeds=_speeds(options, found),
        cores_per_rank=cores / ranks,
        accumulate=options.accumulate,
        share=options.share,
        plot=options.plot,
        json=options.json,
    )


def _measure(options: argparse.Namespace) -> Measure:
    for name in ("link", "calibration"):
        if getattr(options, name):
            raise Conflict(
                f"argument --measure: got --{name} too: measure first, then pass the file as --calibration"
            )
    if dist.is_torchelastic_launched():
        raise Conflict("argument --measure: it starts workers of its own: run it by python, not by torchrun")
    check_workers([calibration.WORKERS])
    check_writable("--measure", options.measure)
    return Measure(options.measure)


def _work(options: argparse.Namespace, found: Calibration | None) -> Work:
    """Return what was given of the model, or else was measured."""
    given: dict[str, Any] = {"numel": options.params, "bucket_bytes": 2**20 * options.bucket_mb}
    for part in ("forward", "backward", "step"):
        milliseconds = getattr(options, f"{part}_ms")
        given[f"{part}_s"] = None if milliseconds is None else milliseconds / 1e3
    given = {name: value for name, value in given.items() if value is not None}
    if found is not None:
        return replace(found.work, **given)
    missing = [
        f"--{name}" for name in ("params", "backward-ms") if getattr(options, name.replace("-", "_")) is None
    ]
    if missing:
        raise Conflict(
            f"argument --link: need {' and '.join(missing)}, or --calibration FILE, which --measure FILE "
            "writes for a model of the benchmark's on this machine"
        )
    return Work(**{"forward_s": 0.0, "step_s": 0.0} | given)


def _speeds(options: argparse.Namespace, found: Calibration | None) -> Speeds:
    """Return what was given of a rank, or else was measured."""
    speeds = found.speeds if found else calibration.nominal(_LATENCY_US / 1e6)
    if options.latency_us is not None:
        speeds = replace(speeds, latency_s=options.latency_us / 1e6)
    if options.transport_gbit_s is not None:  # of a device that sends by itself
        transport = Transport(options.transport_gbit_s * 125e6, 0.0)
        speeds = replace(speeds, transports=dict.fromkeys(speeds.transports, transport))
    if options.kernel_gb_s is not None:
        speeds = replace(speeds, kernels=dict.fromkeys(speeds.kernels, options.kernel_gb_s * 1e9))
    return speeds


def _several(parse: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    return lambda text: tuple(parse(part) for part in text.split(","))


def _links(text: str) -> tuple[float, ...]:
    return _several(finite_above_zero)(text)


def _numel(text: str) -> int:
    value = finite_above_zero(text)
    if not 1 <= value <= 2**50:
        raise argparse.ArgumentTypeError(f"got {text}, need a number of elements from 1 to 2**50")
    return int(value)


def _share(text: str) -> float:
    value = finite_above_zero(text)
    if not value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, need a share above 0 and below 1: 0.05 is 5 %")
    return value


def _wires(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(PLANNED) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"got {text}, need different ones of {', '.join(PLANNED)}")
    return names
