"""`attach` over FSDP2: the units of a sharded model reduce when the window says."""

from __future__ import annotations

from torch import nn

from pyengine.comm import apart, comm_for
from pyengine.engine.make import make_engine
from pyengine.engine.sharded_ranks import ShardedRanks
from pyengine.engine.sync import Sync
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.fsdp.deferral import Deferral, choose, problems_of_deferral
from pyengine.gradients.fsdp.exact import ExactFSDPReducer
from pyengine.gradients.fsdp.problems import check_version, managed_parameters, problems_of_fsdp
from pyengine.gradients.fsdp.reducer import FSDPReducer
from pyengine.gradients.fsdp.sharded import Managed
from pyengine.gradients.fsdp.units import units_of
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings


def attach_sharded(model: nn.Module, settings: Settings, deferral: Deferral) -> Sync:
    """Make the engine of a model that `fully_shard` or `replicate` was called on; see `attach`.

    Raises:
        RuntimeError: this torch's FSDP cannot be driven.
        ValueError: a policy, mesh or argument that cannot be had; on every rank.
    """
    check_version(model)
    units = units_of(model)
    for unit in units:
        unit.module.reshard()  # so that the model shows its sharded parameters
    named, ignored = managed_parameters(model, units)
    # An exception may take a rank out of a backward, while the others are in FSDP's collectives.
    comm = apart(comm_for(next(model.parameters()).device, None))

    ranks = ShardedRanks(units, comm)

    def reducer(specs: list[ParamSpec], terms: Terms) -> FSDPReducer | ExactFSDPReducer:
        del specs
        counted = ranks.counted(units)
        managed = Managed(
            model,
            named,
            units,
            choose(units, deferral),
            [counted[id(param)] for _, param in named],
            comm,
            settings,
        )
        if settings.kind == "exact":
            return ExactFSDPReducer(managed, terms=terms)
        return FSDPReducer(managed)

    problems = [*problems_of_fsdp(model, settings), *problems_of_deferral(units, deferral, settings)]
    engine = make_engine(named, comm, settings, reducer, source=model, problems=problems, ranks=ranks)
    return Sync(engine, ignored=ignored)
