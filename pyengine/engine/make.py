"""The one recipe of an engine: ranks agree on everything before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.nn import Parameter

from pyengine.comm import TorchDist
from pyengine.comm.base import Comm
from pyengine.engine.batch_norm import BatchNormReplay, batch_norm_problems
from pyengine.engine.batch_norm import batch_norms as batch_norms_of
from pyengine.engine.engine import Engine
from pyengine.engine.engine_ranks import EngineRanks
from pyengine.engine.handshake import agree, narrow_problems, problems_of
from pyengine.engine.ownership import owned_problems
from pyengine.engine.sharded_ranks import ShardedRanks
from pyengine.engine.trained import in_backward_problems
from pyengine.engine.whereabouts import whereabouts_of
from pyengine.gradients.base import Reducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings


def make_engine(
    named: Sequence[tuple[str, Parameter]],
    comm: Comm,
    settings: Settings,
    make_reducer: Callable[[list[ParamSpec], Terms], Reducer],
    *,
    source: object,
    problems: Sequence[str],
    ranks: EngineRanks | ShardedRanks | None = None,
) -> Engine:
    """Make an engine over parameters, or raise on every rank what any rank has to complain of.

    Args:
        named: the parameters, in registration order.
        comm: transport; every rank of it calls this.
        settings: this rank's arguments.
        make_reducer: given the parameters' descriptions and the terms of a full window's sum,
            return who owns the gradients; called once all ranks have agreed.
        source: the module, if there is one, that has them.
        problems: what else is wrong here.
        ranks: which ranks share what, where that is not everything.

    Raises:
        ValueError: an argument or a parameter is off, or ranks differ; on every rank, and nothing has
            changed.
    """
    if settings.watches_stalls and isinstance(comm, TorchDist):
        comm.watch_stalls(float(settings.stall_after_s or 0.0))
    try:
        engine = _make(named, comm, settings, make_reducer, source, problems, ranks=ranks)
    except BaseException:
        comm.release()
        raise
    if isinstance(comm, TorchDist):
        comm.tell_position(whereabouts_of(engine))
    return engine


def _make(
    named: Sequence[tuple[str, Parameter]],
    comm: Comm,
    settings: Settings,
    make_reducer: Callable[[list[ParamSpec], Terms], Reducer],
    source: object,
    problems: Sequence[str],
    *,
    ranks: EngineRanks | ShardedRanks | None,
) -> Engine:
    """Make the engine; see `make_engine`."""
    specs = [ParamSpec.of(name, param) for name, param in named] if ranks is None else ranks.specs(named)
    is_exact = settings.kind == "exact"
    model = source if isinstance(source, nn.Module) else None
    module = model if is_exact and model is not None else nn.Module()
    takes_shards = ranks is not None and ranks.takes_dtensors
    found = [
        *problems_of(named, takes_shards=takes_shards),
        *narrow_problems(named, settings),
        *problems,
        *owned_problems(named),
        *in_backward_problems(named),
    ]
    found += batch_norm_problems(module)
    if ranks is not None:
        found += ranks.problems_with(named, settings, num_batch_norms=len(batch_norms_of(module)))
    shares = agree(comm, specs, settings, found, None if ranks is None else ranks.membership)
    reducer = make_reducer(specs, Terms(shares.terms, shares.most_terms))
    batch_norms = BatchNormReplay(module, most=shares.most, total=shares.total)
    batch = None if ranks is None else ranks.shared_batch
    return Engine(reducer, comm, settings, batch_norms, shares=shares, batch=batch, module=model)
