"""What tests start to see what `launch` listens on: a worker makes a group of its own besides,
and both are used.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from pyengine import launch


def add_up() -> tuple[list[float], str]:
    """Return a sum over a second group, and the interface that gloo was told."""
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    dist.barrier()
    return total.tolist(), os.environ.get("GLOO_SOCKET_IFNAME", "")


if __name__ == "__main__":
    print(launch(add_up, workers=2))
