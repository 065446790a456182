"""Orders: which worker is killed, and when.

A run is a chain of jobs of torch.distributed.elastic, with one order per attempt. Either the worker kills
itself when it passes a phase, or another process kills it after some windows and some milliseconds, wherever
the worker is at that time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# In the order of a run. The phases after "save" are those of writing one file of a checkpoint.
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
        phase: the phase in which it dies; empty if it dies at a point in time.
        passes: on which pass of the phase it dies, counted from 1.
        windows: for a point in time: the number of windows that the attempt completes before it.
        seconds: for a point in time: the seconds from the end of these windows.
    """

    rank: int
    phase: str = ""
    passes: int = 1
    windows: int = 0
    seconds: float = 0.0


def draw(generator: random.Random, phases: Sequence[str], world: int) -> list[Order]:
    """Return an order for each of `phases`; an empty phase means a point in time."""
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
