"""`attach`: a DDP loop as it is, whose buckets the engine carries."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from pyengine.engine.handshake import sparse_modules
from pyengine.engine.make import make_engine
from pyengine.engine.sync import Sync
from pyengine.gradients.accumulator import Exact, as_accumulator
from pyengine.gradients.ddp.hook import HookState
from pyengine.gradients.ddp.private import (
    ignored_parameters,
    outside_buckets,
    problems_of_ddp,
    released_state,
    visible_parameters,
)
from pyengine.gradients.ddp.reducer import DDPReducer
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings
from pyengine.ops.device import is_lazy
from pyengine.wire import FP32, Wire
from pyengine.wire.cast import as_wire


def attach(
    ddp_model: DistributedDataParallel,
    *,
    accumulate: int = 1,
    wire: Wire | torch.dtype = FP32(),  # noqa: B008 - frozen
    accumulator: str | Exact | torch.dtype = "fp32",
    nonfinite: str = "skip",
) -> Sync:
    """Let DDP's buckets travel once a window: registers the hook and drives DDP's no_sync.

    Args:
        ddp_model: the wrapped model, without another communication hook.
        accumulate, wire, accumulator, nonfinite: as for `GradSync`. Narrow parameters with "fp32" get fp32
            sums in addition to DDP's buckets: 4 bytes an element more.

    Returns:
        The same loop as `GradSync` gives. Set `.grad` is DDP's own.

    Raises:
        TypeError: not a DistributedDataParallel.
        ValueError: a sparse embedding, which DDP puts into a bucket of its own; a DDP that reduces past its
            buckets, or has a hook; a parameter unfrozen since; a SyncBatchNorm with "exact". Raised on every
            rank.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(_not_ddp(ddp_model))
    named = visible_parameters(ddp_model)
    if is_lazy(named[0][1].device):
        raise ValueError(
            f"ddp_model lies on {named[0][1].device}: DDP reduces from inside the backward, which a "
            "recorded program does not have; use pe.GradSync on the bare model"
        )
    state = released_state(ddp_model) or HookState(ddp_model.process_group)
    settings = Settings(accumulate, as_wire(wire), as_accumulator(accumulator), nonfinite)
    problems = [*problems_of_ddp(ddp_model), *(sparse_modules(ddp_model) or outside_buckets(ddp_model))]

    def reducer(specs: list[ParamSpec], micro_batches: int) -> DDPReducer:
        del specs  # DDP has laid its buckets out
        state.serve(settings.wire)
        return DDPReducer(ddp_model, state, settings=settings, terms=micro_batches)

    comm = state.comm(named[0][1].device)
    engine = make_engine(named, comm, settings, reducer, source=ddp_model.module, problems=problems)
    return Sync(engine, ignored=ignored_parameters(ddp_model))


def _not_ddp(model: object) -> str:
    if any("FSDP" in kind.__name__ or "FullyShard" in kind.__name__ for kind in type(model).__mro__):
        return (
            f"ddp_model is a {type(model).__name__}: a sharded model reduces its gradients by itself, and "
            "neither attach nor GradSync works with it; wrap the whole module in DistributedDataParallel, "
            "or train without pyengine"
        )
    return (
        f"ddp_model is a {type(model).__name__}: need a DistributedDataParallel; for a bare model, not a "
        "sharded one, use pe.GradSync"
    )
