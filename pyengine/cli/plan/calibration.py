"""What was measured of a machine for `plan --link`, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyengine.cli.arguments import Conflict
from pyengine.cli.plan.model import Speeds, Transport, Work
from pyengine.cli.terminal import read_json
from pyengine.ops.codec_reference import FORMATS

TRANSPORTS = ("all_reduce fp32", "all_reduce bf16", "all_reduce fp16", "exchange")
WORKERS = 2  # that measure, at the same time
KERNELS = tuple(f"{op} {form}" for form in FORMATS for op in ("encode", "encode_residual", "sum", "decode"))


@dataclass(frozen=True)
class Calibration:
    """One machine, as `python -m pyengine plan --measure` finds it.

    Attributes:
        machine: its card, for people.
        cores: that its processor has.
        speeds: of a rank.
        work: of the model that was measured, in buckets of the engine's own size.
    """

    machine: Mapping[str, Any]
    cores: int
    speeds: Speeds
    work: Work


def nominal(latency_s: float) -> Speeds:
    """Return speeds for want of a measurement: a transport that nothing limits, kernels at 8 GB/s."""
    return Speeds(
        latency_s,
        dict.fromkeys(TRANSPORTS, Transport(math.inf, 0.0)),
        dict.fromkeys(KERNELS, 8e9),
    )


def write(calibration: Calibration, path: Path) -> None:
    """Write a calibration as JSON."""
    path.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Calibration:
    """Return the calibration of a file; a result file of a benchmark may hold it as "calibration".

    Raises:
        Conflict: it cannot be read, or holds something else.
    """
    try:
        content = read_json(path.read_text(encoding="utf-8"))
        return _made(content.get("calibration", content))
    except OSError as error:
        raise Conflict(f"argument --calibration: cannot read {path} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Conflict(
            f"argument --calibration: {path} holds no calibration ({type(error).__name__}: {error}): write "
            "one by `python -m pyengine plan --measure FILE`"
        ) from None


def _made(content: Mapping[str, Any]) -> Calibration:
    speeds, work = content["speeds"], Work(**content["work"])
    transports = {name: Transport(**speeds["transports"][name]) for name in TRANSPORTS}
    kernels = {name: speeds["kernels"][name] for name in KERNELS}
    calibration = Calibration(
        machine=content["machine"],
        cores=content["cores"],
        speeds=Speeds(speeds["latency_s"], transports, kernels),
        work=work,
    )
    for name, value in _numbers(asdict(calibration) | {"machine": {}}, ""):
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}, need a number above 0")
    return calibration


def _numbers(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return every leaf with where it stands."""
    if not isinstance(value, Mapping):
        return [(name, value)]
    return [leaf for key, each in value.items() for leaf in _numbers(each, f"{name}.{key}".lstrip("."))]
