"""DDP without its reductions: the engine's buckets hold the gradients of the wrapped module.

DDP still moves inputs and runs its forward. This file uses undocumented attributes of DDP, which were checked
in the source of torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.own import BucketReducer, Groups
from pyengine.gradients.settings import Settings
from pyengine.ops.capture import report as report_uncapturable
from pyengine.ops.capture import section
from pyengine.ops.device import bucket_cap_mb, current_stream, is_on_default_stream


def visible_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP does not ignore, in registration order."""
    found: dict[int, tuple[str, Parameter]] = {}
    for prefix, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            # The same comparison as in DDP, which ignores no parameter of the outermost module.
            if f"{prefix}.{name}" not in ddp.parameters_to_ignore:
                found.setdefault(id(param), (f"{prefix}.{name}".lstrip("."), param))
    return list(found.values())


def ignored_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP ignores, in registration order."""
    visible = {id(param) for _, param in visible_parameters(ddp)}
    return [(name, param) for name, param in ddp.module.named_parameters() if id(param) not in visible]


def cap_mb_of(ddp: DistributedDataParallel) -> float:
    """Return DDP's bucket size in MiB, or the engine's default if DDP uses its own default."""
    if ddp.bucket_bytes_cap_default:
        return bucket_cap_mb(next(ddp.parameters()).device)
    return max(ddp.bucket_bytes_cap, 1) / 2**20


def problems_of_ddp(ddp: DistributedDataParallel) -> Iterator[str]:
    """Yield a message for each setting that prevents disabling the reductions of DDP or a nested DDP."""
    for each in _all_ddps(ddp):
        name = "ddp_model" if each is ddp else "a DistributedDataParallel inside ddp_model"
        if each._delay_all_reduce_params:
            yield (
                f"{name} was made with delay_all_reduce_named_params, whose gradients DDP reduces in every "
                "backward: leave it out; the engine reduces all gradients once per window"
            )
        if each.mixed_precision is not None:
            yield (
                f"{name} was made with mixed_precision, which installs its own communication hook: leave it "
                "out, and use torch.autocast or narrow parameters"
            )
        elif each._comm_hooks:
            yield (
                f"{name} has a communication hook, which would not be called, since DDP reduces nothing "
                "under an engine: pass its wire to attach, for example wire='bf16', and wrap the module "
                "again without register_comm_hook"
            )
        if hasattr(each, "buffer_hook"):
            yield (
                f"{name} has a hook for its buffers (_register_buffer_comm_hook), which would not be called: "
                "leave it out; the engine broadcasts buffers once per window"
            )
        ranks, inner = _ranks_of(ddp), _ranks_of(each)
        if inner != ranks:
            yield (
                f"{name} sums over ranks {inner}, and ddp_model over {ranks}: have ddp_model ignore its "
                "parameters, and name their group in axes.groups"
            )


class SilentDDP:
    """A DDP model and its nested DDPs, with gradient synchronization switched off until `release`.

    Attributes:
        ddp: the outermost DDP.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp, self._all = ddp, _all_ddps(ddp)
        self._before = [
            (each, each.require_backward_grad_sync, each.require_forward_param_sync, _is_learned(each))
            for each in self._all
        ]
        self._only = ddp.module.register_forward_pre_hook(OnlyDDP(ddp))
        for each in self._all:
            vars(each)[_DRIVEN] = _Driven()
        self.silence()

    def silence(self) -> None:
        """Switch off DDP's collectives in forward and backward passes, even if other code enabled them."""
        for each in self._all:
            each.require_backward_grad_sync = each.require_forward_param_sync = False
            if each.static_graph:
                # Prevents an all-reduce of all gradients in the backward of DDP's outputs.
                each._static_graph_delay_allreduce_enqueued = True

    def buffers(self) -> list[Tensor]:
        """Return views of the buffers that DDP would broadcast, with separate version counters.

        As in DDP's own broadcast, a write to a view does not change the version of the buffer. A graph that
        has saved the buffer therefore stays valid.
        """
        found = {
            id(buffer): buffer.data
            for each in self._all
            if each.broadcast_buffers
            for name, buffer in each.module.named_buffers()
            if name not in each.parameters_to_ignore
        }
        return list(found.values())

    def release(self) -> None:
        """Restore DDP, so that it reduces gradients as before."""
        self._only.remove()
        for each, backward, forward, is_learned in self._before:
            each.require_backward_grad_sync, each.require_forward_param_sync = backward, forward
            vars(each).pop(_DRIVEN, None)
            if each.static_graph:
                each._static_graph_delay_allreduce_enqueued = is_learned
            if each.find_unused_parameters or (each.static_graph and not is_learned):
                _renew_reducer(each)
        self._before, self._all = [], []


class DDPReducer(BucketReducer):
    """Reducer for a `SilentDDP`, which also broadcasts DDP's buffers once per window."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        groups: Groups,
        settings: Settings,
        terms: Terms,
    ) -> None:
        super().__init__(specs, params, groups=groups, settings=settings, terms=terms)
        self._silent = silent = SilentDDP(ddp)
        # Called by `release`, or when the engine is freed without `close`.
        self._release_ddp = finalize(self, silent.release)
        self._release_ddp.atexit = False
        # The `Transfers` of the last window in which buffers were broadcast.
        self._broadcast_in: object = None
        self._stream = current_stream(self.params[0].device)

    def open(self) -> None:
        if self._silent.ddp._join_config.enable:
            raise RuntimeError(
                "leave ddp_model.join() out: a loop over windows already handles ranks without data, which "
                "send zeros"
            )
        self._silent.silence()

    def begin(self) -> None:
        super().begin()
        if section() is not None and current_stream(self.params[0].device) != self._stream:
            report_uncapturable(f"DDP was made on a different stream than windows run on: {_ON_ONE_STREAM}")

    def launch_rest(self, *, poison: bool = False) -> None:
        """Launch the remaining buckets, then broadcast DDP's buffers, once per window on every rank."""
        transfers = self._transfers
        super().launch_rest(poison=poison)
        if transfers is None or transfers is self._broadcast_in or transfers.header.is_refused():
            return
        self._broadcast_in = transfers
        if buffers := self._silent.buffers():
            self._groups.comms[0].broadcast_(buffers)

    @property
    def capture_problems(self) -> list[str]:
        problems = super().capture_problems
        if is_on_default_stream(self.params[0].device):
            problems.append(f"the default stream of a device cannot be captured: {_ON_ONE_STREAM}")
        return problems

    def release(self, *, keeps_grad: bool) -> None:
        super().release(keeps_grad=keeps_grad)
        self._broadcast_in = None
        self._release_ddp()


# DDP holds references to the autograd nodes that accumulate gradients. These nodes use the stream on which
# DDP was created.
_ON_ONE_STREAM = "make DDP and the engine, and run windows, inside one `with torch.Stream(device):`"

# ---- errors for forwards and copies that would not be synchronized ----


class OnlyDDP:
    """Forward pre-hook that refuses forwards through another DDP over the same parameters.

    Hooks of the other DDP would reduce the gradients a second time. Copies and pickles of the model contain
    a hook that does nothing in place of this hook.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ref(ddp)
        self._mine = {id(param) for _, param in visible_parameters(ddp)}
        self._harmless: WeakSet[DistributedDataParallel] = WeakSet()

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        other = DistributedDataParallel._active_ddp_module  # the innermost DDP whose forward is running
        if other is None or other is self._ddp() or other in self._harmless:
            return
        if self._mine.isdisjoint(id(param) for _, param in visible_parameters(other)):
            self._harmless.add(other)
        elif torch.is_grad_enabled() and other.require_backward_grad_sync:
            raise RuntimeError(
                "call the ddp_model that was passed to pe.attach: this forward runs through another "
                "DistributedDataParallel over the same parameters, which would reduce their gradients in "
                "every backward, before the engine sums them over ranks. To evaluate with it, use "
                "torch.no_grad()"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_check_nothing,)


def _check_nothing(*_: Any) -> None:
    pass


_DRIVEN = "_driven_by_pyengine"


class _Driven:
    """Marker attribute that is set on a DDP whose own reductions are switched off.

    It makes copying or pickling that DDP fail, because a copy would never be synchronized.
    """

    def __reduce__(self) -> Any:
        raise TypeError(
            "copy or save ddp_model.module, or its state_dict(): this DistributedDataParallel is attached "
            "to an engine, and a copy of it would never be synchronized"
        )


def _all_ddps(ddp: DistributedDataParallel) -> list[DistributedDataParallel]:
    return [module for module in ddp.modules() if isinstance(module, DistributedDataParallel)]


def _ranks_of(ddp: DistributedDataParallel) -> list[int]:
    return sorted(dist.get_process_group_ranks(ddp.process_group))


def _renew_reducer(ddp: DistributedDataParallel) -> None:
    """Recreate DDP's reducer, as unpickling does, because the old reducer holds state from past backwards."""
    params, expects_sparse = ddp._build_params_for_reducer()
    if params:
        names = ddp._build_debug_param_to_name_mapping(params)
        ddp._ddp_init_helper(params, expects_sparse, names, ddp.static_graph)
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            assert ddp.logger is not None  # created together with the reducer
            ddp.logger._set_static_graph()


def _is_learned(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.static_graph and ddp._static_graph_delay_allreduce_enqueued)
