"""A script for torchrun: calls `launch` once per argument, with that many workers, and prints the results."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from pyengine import launch


def place(call: int) -> tuple[int, int]:
    """Return the call and the rank, after a barrier.

    Rank 1 fails in the call that `FAILS_AT` lists for this start of the workers.
    """
    dist.barrier()
    fails_at = os.environ.get("FAILS_AT", "").split(",")
    if dist.get_rank() == 1 and f"{call}" in fails_at[int(os.environ["TORCHELASTIC_RESTART_COUNT"]) :][:1]:
        raise ValueError("boom")
    return call, dist.get_rank()


if __name__ == "__main__":
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0 and os.environ["RANK"] == os.environ.get("ABSENT"):
        time.sleep(2)  # by then the other rank waits
        raise SystemExit("absent")
    for call, workers in enumerate(sys.argv[1:]):
        # If hosts join and leave, a restarted script may ask for a different number of workers.
        places = launch(place, workers=int(workers) + restarts, args=(call,))
        sys.stdout.write(f"{places}\n")  # in one write: all workers share a pipe
