"""Who is killed when.

A run is a chain of jobs of torch.distributed.elastic, and has one order an attempt: either the doomed worker
kills itself on passing a phase, or another process kills it after some windows and some milliseconds,
wherever it is then.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# In the order of a run. What stands behind "save" is the writing of one file of a checkpoint.
ONCE = ("start", "met", "load", "resumed")
WINDOW = ("loader", "forward", "backward", "hook", "bucket", "collective", "clip", "step", "stepped")
WINDOW += ("scheduler", "callback")
SAVE = ("save", "opened", "half written", "unsynced", "unnamed", "named", "written", "remove", "saved")
PHASES = (*ONCE, *WINDOW, *SAVE)


@dataclass(frozen=True)
class Order:
    """One kill.

    Attributes:
        rank: of the worker that dies.
        phase: on passing which; empty for a moment.
        passes: the how manyth pass, from 1.
        windows: that the attempt has ended before a moment.
        seconds: from there to the moment.
    """

    rank: int
    phase: str = ""
    passes: int = 1
    windows: int = 0
    seconds: float = 0.0


def draw(generator: random.Random, phases: Sequence[str], world: int) -> list[Order]:
    """Return an order for each of `phases`; an empty one is a moment."""
    orders = []
    for phase in phases:
        rank = generator.randrange(world)
        if phase:
            passes = 1 if phase in ONCE else generator.randint(1, 12 if phase == "collective" else 3)
            orders.append(Order(rank, phase, passes))
        else:
            windows = generator.randrange(4)
            longest_s = 0.03 if windows else 0.4  # a window takes some 30 ms, the start of an attempt longer
            orders.append(Order(rank, windows=windows, seconds=longest_s * generator.random()))
    return orders
