"""`attach` over DDP: its buckets travel when the window says."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm import TorchDist
from pyengine.comm.axes import Axes, has_group
from pyengine.comm.base import Comm
from pyengine.engine.engine_ranks import EngineRanks
from pyengine.engine.handshake import prepare_wire, sparse_modules
from pyengine.engine.make import make_engine
from pyengine.engine.sync import Sync
from pyengine.gradients.ddp.hook import HookState
from pyengine.gradients.ddp.private import (
    ignored_parameters,
    outside_buckets,
    problems_of_ddp,
    released_state,
    visible_parameters,
)
from pyengine.gradients.ddp.reducer import DDPReducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.settings import Settings
from pyengine.gradients.two_owners import TwoOwners
from pyengine.ops.device import is_lazy


def attach_ddp(
    ddp_model: DistributedDataParallel, settings: Settings, device_mesh: DeviceMesh | None, axes: Axes
) -> Sync:
    """Make the engine of a DDP; see `attach`."""
    visible, ignored = visible_parameters(ddp_model), ignored_parameters(ddp_model)
    own = [(name, param) for name, param in ignored if has_group(name, axes)]
    named = [*visible, *own]
    if is_lazy(named[0][1].device):
        raise ValueError(
            f"ddp_model lies on {named[0][1].device}: DDP reduces from inside the backward, which a "
            "recorded program does not have; use pe.GradSync on the bare model"
        )
    state = released_state(ddp_model) or HookState(ddp_model.process_group)
    problems = [*problems_of_ddp(ddp_model), *(sparse_modules(ddp_model) or outside_buckets(ddp_model))]

    ranks = EngineRanks(named, named[0][1].device, group=state.group, mesh=device_mesh, axes=axes)
    problems += ranks.problems_under_ddp(visible, ddp_model.process_group)

    def reducer(specs: list[ParamSpec], terms: Terms) -> DDPReducer | TwoOwners:
        ddp: DDPReducer | None = None
        try:
            _travel_by(state, ranks, settings)
            ddp = DDPReducer(ddp_model, state, settings=settings, terms=terms)
            if own:
                return _two_owners(ddp, specs[len(visible) :], own, ranks, settings, terms)
            ddp.counted = ranks.counted(ddp.names)
            return ddp
        except BaseException:  # DDP goes on as it was
            state.release() if ddp is None else ddp.release(keeps_grad=True)
            raise

    source = ddp_model.module
    engine = make_engine(named, ranks.comm, settings, reducer, source=source, problems=problems, ranks=ranks)
    reduced = {id(param) for _, param in own}
    return Sync(engine, ignored=[param for _, param in ignored if id(param) not in reduced])


def _travel_by(state: HookState, ranks: EngineRanks, settings: Settings) -> None:
    """Let DDP's buckets travel by a transport of the engine's."""
    state.serve(settings.wire)
    device = ranks.device
    comm: Comm = ranks.comm
    if ranks.has_mesh or not isinstance(comm, TorchDist):
        comm = TorchDist(state.group, device)  # DDP's ranks are some of the engine's, or this one alone
        comm.join(ranks.comm)
    comm = ranks.for_buckets(comm, shared_memory=settings.shared_memory)
    assert isinstance(comm, TorchDist)
    state.travel_by(comm, device)
    prepare_wire(settings.wire, [comm], ranks.comm)


def _two_owners(
    ddp: DDPReducer,
    specs: list[ParamSpec],
    own: Sequence[tuple[str, Parameter]],
    ranks: EngineRanks,
    settings: Settings,
    terms: Terms,
) -> TwoOwners:
    """Return what reduces DDP's parameters, and in buckets of ours those of `own`, as `specs` has them."""
    names, params = zip(*own, strict=True)
    groups = ranks.own_groups(names, shared_memory=settings.shared_memory)
    prepare_wire(settings.wire, [groups.comms[index] for index in ranks.groups_named(names)], ranks.comm)
    ranks.broadcast(own, groups)
    return TwoOwners(
        ddp,
        specs,
        params,
        groups=groups,
        counted=ranks.counted([*ddp.names, *names]),
        settings=settings,
        terms=terms,
    )
