"""A script for tests of listening sockets: workers of `launch` use the default group and a second one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from pyengine import launch


def add_up() -> tuple[list[float], str]:
    """Return a sum over a second group, and the network interface that is set for gloo."""
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    dist.barrier()
    return total.tolist(), os.environ.get("GLOO_SOCKET_IFNAME", "")


if __name__ == "__main__":
    print(launch(add_up, workers=2))
