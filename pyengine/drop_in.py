"""`attach`: a DDP loop as it is, whose buckets the engine carries."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from pyengine.accumulator import Exact
from pyengine.agreement import Settings, agree, problems_of, sparse_modules
from pyengine.batch_norm import BatchNormReplay, batch_norm_problems, replayed
from pyengine.ddp import DDPReducer
from pyengine.engine import Engine
from pyengine.hook import HookState
from pyengine.host import is_lazy
from pyengine.layout import ParamSpec
from pyengine.sync import Sync
from pyengine.wire import FP32, Wire


def attach(
    ddp_model: DistributedDataParallel,
    *,
    accumulate: int,
    wire: Wire = FP32(),  # noqa: B008 - frozen
    accumulator: str | Exact = "fp32",
    nonfinite: str = "skip",
) -> Sync:
    """Let DDP's buckets travel once a window: registers the hook and drives DDP's no_sync.

    Args:
        ddp_model: the wrapped model, without another communication hook.
        accumulate, wire, accumulator, nonfinite: as for `GradSync`. Narrow parameters with "fp32" get fp32 sums beside
            DDP's buckets: 4 bytes an element more.

    Returns:
        The same loop as `GradSync` gives. Set `.grad` is DDP's own.

    Raises:
        TypeError: not a DistributedDataParallel.
        ValueError: a sparse embedding, which DDP puts into a bucket of its own; a SyncBatchNorm with "exact".
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model is a {type(ddp_model).__name__}: need a DistributedDataParallel; for a bare model use pe.GradSync"
        )
    named = list(ddp_model.module.named_parameters())
    if is_lazy(named[0][1].device):
        raise ValueError(
            f"ddp_model lies on {named[0][1].device}: DDP reduces from inside the backward, which a recorded program does not "
            "have; use pe.GradSync on the bare model"
        )
    state = HookState(wire=wire, group=ddp_model.process_group)
    specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named]
    settings = Settings(accumulate, wire, accumulator, nonfinite)
    comm = state.comm(named[0][1].device)
    module = replayed(ddp_model.module, is_exact=settings.kind == "exact")
    problems = [*problems_of(named), *sparse_modules(ddp_model), *batch_norm_problems(module)]
    shares = agree(comm, specs, settings, problems)
    reducer = DDPReducer(ddp_model, state, accumulator=settings.kind, terms=shares.terms)
    norms = BatchNormReplay(module, most=shares.most, total=shares.total)
    return Sync(Engine(reducer, comm, settings, norms, shares=shares))
