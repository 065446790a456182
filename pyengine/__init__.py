"""pyengine: gradients travel once a window.

Three ways in: `GradSync` for a loop of your own, `attach` (or only `comm_hook`) for stock DDP, and
`python -m pyengine` from the command line.
"""

from pyengine import wire
from pyengine.accumulator import Exact
from pyengine.batch import BatchPlan, plan_batch, scale_lr, warm_up
from pyengine.dealer import Dealer
from pyengine.drop_in import attach
from pyengine.grad_sync import GradSync
from pyengine.hook import HookState, comm_hook
from pyengine.launching import launch
from pyengine.norm import GradScaler
from pyengine.record import StepRecord
from pyengine.sampler import WindowSampler
from pyengine.seed import micro_batch_rng, sample_rng, seed_everything, seed_rank, worker_init
from pyengine.sync import Sync

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "Dealer",
    "Exact",
    "GradScaler",
    "GradSync",
    "HookState",
    "StepRecord",
    "Sync",
    "WindowSampler",
    "attach",
    "comm_hook",
    "launch",
    "micro_batch_rng",
    "plan_batch",
    "sample_rng",
    "scale_lr",
    "seed_everything",
    "seed_rank",
    "warm_up",
    "wire",
    "worker_init",
]
