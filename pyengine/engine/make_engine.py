"""Construction of an engine: either all ranks agree, or every rank raises an error and changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn import Parameter

from pyengine.engine.engine import Engine
from pyengine.engine.engine_ranks import EngineRanks, ShardedRanks
from pyengine.engine.handshake import agree, problems_of, problems_of_exact
from pyengine.engine.parameters import in_backward_problems, owned_problems
from pyengine.gradients.base import Reducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings

# The position that the stall report gives for a rank whose engine was freed.
_FREED = "the end of its engine, which was freed: keep `sync` in a variable for as long as the other ranks do"


def make_engine(
    named: Sequence[tuple[str, Parameter]],
    ranks: EngineRanks | ShardedRanks,
    settings: Settings,
    make_reducer: Callable[[list[ParamSpec], Terms], Reducer],
    *,
    source: object,
    problems: Sequence[str],
) -> Engine:
    """Create an engine; if any rank has a problem, raise an error on every rank and change nothing.

    After all ranks have agreed, `make_reducer` creates the reducer, which owns the gradients. `source` is the
    module that contains the parameters, or None. `problems` are additional problems of this rank.
    """
    comm = ranks.comm
    if settings.watches_stalls:
        comm.watch_stalls(float(settings.stall_after_s or 0.0))
    try:
        specs = ranks.specs(named)
        model = source if isinstance(source, nn.Module) else None
        found = [
            *problems_of(named, settings, takes_shards=ranks.takes_dtensors),
            *problems,
            *owned_problems(named),
            *in_backward_problems(named),
            *ranks.problems_with(named, settings),
            *problems_of_exact(source, settings),
        ]
        split = agree(comm, specs, settings, found, ranks.membership)
        reducer = make_reducer(specs, Terms(split.terms, split.most_terms))
        batch = ranks.membership.shared_batch
        engine = Engine(reducer, comm, settings, split=split, batch=batch, module=model)
    except BaseException:
        comm.release()
        raise
    whereabouts = weakref.WeakMethod(engine.whereabouts)  # the stall watch must not keep the engine alive
    comm.report_position(lambda: _FREED if (find := whereabouts()) is None else find())
    return engine
