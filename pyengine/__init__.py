"""pyengine: gradients travel once a window.

Three ways in: `GradSync` for a loop of your own, `attach` (or only `comm_hook`) for stock DDP, and
`python -m pyengine` from the command line. `pyengine.ops` has the kernels without an engine.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "pyengine":
    # `python -m pyengine`, which a signal may end in the seconds that the imports below take.
    from pyengine.cli import stopping

    stopping.at_start()

from pyengine import ops, telemetry, wire
from pyengine.audit.auditor import AuditError, Finding
from pyengine.audit.handle import Audit, audit
from pyengine.comm.axes import Axes
from pyengine.comm.launching import launch
from pyengine.data.batch_plan import BatchPlan, plan_batch, scale_lr, warm_up
from pyengine.data.rng import micro_batch_rng, sample_rng, seed_everything, seed_rank, worker_init
from pyengine.data.sampler import WindowSampler
from pyengine.engine.attach import attach
from pyengine.engine.captured_windows import CapturedWindows
from pyengine.engine.engine import MicroBatch
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.ddp.hook import HookState, comm_hook
from pyengine.gradients.settings import Exact
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.step_record import StepRecord
from pyengine.step.window_optimizer import WindowOptimizer
from pyengine.window.measure import GradNorms
from pyengine.window.noise_scale import NoiseEstimate, NoiseScale
from pyengine.window.spikes import Spike, SpikePolicy

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "AuditError",
    "Axes",
    "BatchPlan",
    "CapturedWindows",
    "Exact",
    "Finding",
    "GradNorms",
    "GradScaler",
    "GradSync",
    "HookState",
    "MicroBatch",
    "NoiseEstimate",
    "NoiseScale",
    "Spike",
    "SpikePolicy",
    "StepRecord",
    "Sync",
    "WindowOptimizer",
    "WindowSampler",
    "attach",
    "audit",
    "comm_hook",
    "launch",
    "micro_batch_rng",
    "ops",
    "plan_batch",
    "sample_rng",
    "scale_lr",
    "seed_everything",
    "seed_rank",
    "telemetry",
    "warm_up",
    "wire",
    "worker_init",
]


# Removed names and what to use instead, answered for one release.
_REMOVED = {
    "Checkpoints": "save sync.state_dict() by torch.save, load it with weights_only=True, or use "
    "torch.distributed.checkpoint (docs/reliability.md)",
    "Dealer": "pass the loader of a pe.WindowSampler, and fewer micro-batches (accumulate=) on a slower rank",
}

if not TYPE_CHECKING:  # under which every name would exist

    def __getattr__(name: str) -> Any:
        if name in _REMOVED:
            raise AttributeError(f"pyengine.{name} has been removed: {_REMOVED[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
