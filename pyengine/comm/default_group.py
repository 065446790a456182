"""Destroys torch's default process group, so that none of its threads outlives it.

The threads of a gloo group may be the last to hold a tensor of a collective, and need the interpreter to free
it. In an interpreter that is ending they abort or hang the process. So they have to be joined before, by the
destruction of the group, while this thread does not hold the interpreter.
"""

from __future__ import annotations

import gc
import logging
import sys
import time

import torch.distributed as dist

# On its first import (by an optimizer, for example) the default group becomes the default value of arguments
# there, which keeps the threads of the group. So the module has to be imported before there is a group.
import torch.distributed.nn.functional  # noqa: F401

_log = logging.getLogger("pyengine.comm")

_WITHIN_S = 0.2  # a thread frees its callbacks within milliseconds


def destroy_default_group() -> None:
    """Destroy torch's default group, and join its threads unless other code still holds the group.

    Cost: a garbage collection, which frees cycles that hold the group (models under DDP). Such an object must
    not be the last holder: it would join the threads without releasing the interpreter. Nor must one of the
    threads be, which would join itself and end the process: the callback of torch's PowerSGD hook holds the
    group until its thread has freed it. A fifth of a second where other code keeps the group.
    """
    group, alone = dist.group.WORLD, object()
    dist.destroy_process_group()
    gc.collect()
    end = time.monotonic() + _WITHIN_S
    while sys.getrefcount(group) > sys.getrefcount(alone) and time.monotonic() < end:
        time.sleep(1e-4)  # releases the interpreter
    del group
    _log.debug("destroyed the default process group")
