"""A whole window as one CUDA graph, for variants that can be captured.

In processes of its own: a capture that fails leaves torch's allocator in the middle of it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch import Tensor

from pyengine.cli.bench.windows.device import DEVICES, Processor
from pyengine.cli.bench.windows.measure import Setting
from pyengine.cli.bench.windows.variants import Variant

_WARM_UP = 11  # what torch asks of DDP before a capture


def replays(setting: Setting, variant: str) -> dict[str, float]:
    """Capture a window of a variant on this rank, replay it, and return milliseconds.

    Raises:
        RuntimeError: it cannot be captured, or replays do not train.
    """
    device = DEVICES[setting.device]()
    with device.entered(), device.for_capture():
        made = setting.make(variant, device)
        for group in made.optimizer.param_groups:
            group["capturable"] = True
        for _ in range(_WARM_UP):
            made.marks(lambda: None)
        device.synchronize()
        replay = device.capture(lambda: made.marks(lambda: None))
        before = [parameter.detach().clone() for parameter in made.model.parameters()]
        replay()
        _check(made, before)
        taken = [_turn(replay, device) for _ in range(setting.rounds)]
    return {
        "graph_p50_ms": statistics.median(seconds for seconds, _ in taken) * 1e3,
        "graph_host_p50_ms": statistics.median(host for _, host in taken) * 1e3,
    }


def _turn(replay: Any, device: Processor) -> tuple[float, float]:
    """Return the seconds of a window on the device, and on the host; as `Contestant.turn`."""
    device.synchronize()
    start = time.perf_counter()
    replay()
    host = time.perf_counter() - start
    begin = device.now()
    replay()
    end = device.now()
    device.synchronize()
    return device.seconds(begin, end), host


def _check(variant: Variant, before: list[Tensor]) -> None:
    pairs = zip(variant.model.parameters(), before, strict=True)
    has_moved = any(not bool((parameter == old).all()) for parameter, old in pairs)
    norm = float(variant.grad_norm)
    if not (has_moved and 0 < norm < float("inf")):
        raise RuntimeError(
            f"the window was captured, and a replay does not train: gradient norm {norm:g}, parameters "
            f"{'changed' if has_moved else 'as they were'}"
        )
