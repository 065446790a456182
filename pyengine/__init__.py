"""pyengine: gradient synchronization once per window.

There are three entry points: `GradSync` for your own loop, `attach` for a DDP or FSDP2 model (or `comm_hook`
alone for a DDP model), and `python -m pyengine` on the command line. `pyengine.ops` contains the kernels,
which can be used without an engine.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "pyengine":
    # With `python -m pyengine`, a signal may arrive during the seconds that the imports below take.
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
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.micro_batch import MicroBatch
from pyengine.engine.sync import Sync
from pyengine.gradients.ddp.hook import HookState, comm_hook
from pyengine.gradients.settings import Exact
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.step_record import StepRecord
from pyengine.step.window_optimizer import WindowOptimizer
from pyengine.window.metric import GradNorms
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


# Removed names and their replacements, kept for one release.
_REMOVED = {
    "pyengine.Checkpoints": "save sync.state_dict() with torch.save and load it with weights_only=True, or "
    "use torch.distributed.checkpoint (docs/reliability.md)",
    "pyengine.Dealer": "use a loader with a pe.WindowSampler; a slower rank may have a smaller accumulate=",
    "pyengine.wire.Hierarchical": "NCCL itself reduces within each host first; over gloo, pass "
    "shared_memory=True, so that the ranks of a host together send each bucket only once",
}


def _answer(module: str, name: str) -> NoReturn:
    if (remedy := _REMOVED.get(f"{module}.{name}")) is not None:
        raise AttributeError(f"{module}.{name} has been removed: {remedy}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__ = partial(_answer, __name__)
    wire.__getattr__ = partial(_answer, wire.__name__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
