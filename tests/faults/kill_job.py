"""A job under torch.distributed.elastic whose workers are killed as ordered: python kill_job.py JOB.json

Its workers are forks of a server that has imported torch once and has no threads. A fork of the agent, which
has threads, might wait forever for a lock that one of the threads held. The exit code is 0 if the run was
completed, and 3 if the restarts were used up before that.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
from pathlib import Path

from kill_orders import Order
from kill_scenario import KillTrap, Plan, train
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import pyengine as pe

USED_UP = 3


def work(plan: Plan, orders: list[Order], world: int) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    order = orders[attempt] if attempt < len(orders) and orders[attempt].rank == rank else None
    trap = KillTrap(order, plan.passed)
    trap.at("start")
    return pe.launch(train, workers=world, args=(plan, trap, attempt))[0]


def main() -> int:
    """Run the job that a file describes; return the exit code."""
    job = json.loads(Path(sys.argv[1]).read_text())
    plan = Plan(Path(job["folder"]), job["windows"], job["accumulator"])
    orders, world = [Order(**order) for order in job["orders"]], job["world"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.set_forkserver_preload(["kill_scenario"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=plan.folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=job["max_restarts"],
        monitor_interval=0.05,
        start_method="forkserver",
    )
    try:
        digests = elastic_launch(config, work)(plan, orders, world)
    except ChildFailedError:
        return USED_UP
    (plan.folder / "end.json").write_text(json.dumps(sorted(set(digests.values()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
