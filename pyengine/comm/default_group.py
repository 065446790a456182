"""The end of torch's default process group, so that no thread of it outlives it.

The threads of a gloo group may be the last to hold a tensor of a collective, and need the interpreter to free
it. In one that is ending they abort or hang the process, so they have to be joined before, by the end of the
group itself, while this thread does not hold the interpreter.
"""

from __future__ import annotations

import gc
import logging
import sys
import time

import torch.distributed as dist

# Its functions keep the default group that they find when the module is first imported (as an optimizer does)
# as the default of an argument, and with it the group's threads: it has to be imported before there is one.
import torch.distributed.nn.functional  # noqa: F401

_log = logging.getLogger("pyengine.comm")

_WITHIN_S = 0.2  # a thread frees what it has called back within milliseconds


def destroy_default_group() -> None:
    """Destroy torch's default group, and join its threads unless somebody still holds the group.

    Cost: a collection of garbage, of what holds the group in cycles (models under DDP). Such an object must
    not be its last holder: it would join the threads without giving the interpreter away. Nor must one of the
    threads, which would join itself and end the process: what torch's PowerSGD hook calls back holds the
    group until the thread has freed that. A fifth of a second where somebody holds it for good.
    """
    group, alone = dist.group.WORLD, object()
    dist.destroy_process_group()
    gc.collect()
    end = time.monotonic() + _WITHIN_S
    while sys.getrefcount(group) > sys.getrefcount(alone) and time.monotonic() < end:
        time.sleep(1e-4)  # gives the interpreter away
    del group
    _log.debug("destroyed the default process group")
