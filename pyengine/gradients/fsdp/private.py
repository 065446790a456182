"""What FSDP2 does not tell in public: what it was made with, and what its setters have replaced; checked
against torch 2.11 to 2.13.

Here state is read, and put back at the end. Everything that a window needs goes through public methods, but
for two that torch has since 2.13: `reduce_unused` and `reset_iter_state` do their work before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

# By kind, the setters that say it, and what a window cannot do without.
_NEEDED = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "reshard",
)
_REPLACED = (
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
)
_SINCE_2_13 = ("reduce_scatter_unused_params",)
_READ = ("mesh_info", "mp_policy", "offload_policy", "device", "_partial_reduce_output")


def is_unit(module: object) -> bool:
    """Whether `fully_shard` or `replicate` was called on a module."""
    # By name: to import the class takes longer than this package.
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def missing(module: Any) -> list[str]:
    """Return what this version of torch lacks."""
    names = [name for name in _NEEDED if not hasattr(module, name)]
    names += [] if hasattr(torch.Tensor, "grad_dtype") else ["Tensor.grad_dtype"]
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if not hasattr(state, "_fsdp_param_group"):
        return [*names, "_fsdp_param_group"]
    groups = _groups_of(state)
    return names + [name for group in groups for name in (*_REPLACED, *_READ) if not hasattr(group, name)]


def groups_of(module: Any) -> list[Any]:
    """Return the groups of parameters that a unit reduces together; several where it has several meshes."""
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    # torch 2.11 has one at most.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else list(groups)


def parameters_of(module: Any) -> list[Parameter]:
    """Return the sharded parameters that a unit manages."""
    return [managed.sharded_param for group in groups_of(module) for managed in group.fsdp_params]


def reduced_parameters(module: Any, waiting: Collection[int] = ()) -> list[Parameter]:
    """Return the sharded parameters whose gradients a unit reduces: those that a forward has shown, and that
    are trained there, or were when they got a gradient that has waited since.

    Args:
        module: the unit.
        waiting: ids of the latter; `waiting_parameters` before the backward that reduces.
    """
    return [
        managed.sharded_param
        for managed in _shown(module)
        if managed._unsharded_param.requires_grad or id(managed.sharded_param) in waiting
    ]


def waiting_parameters(module: Any) -> set[int]:
    """Return the ids of the sharded parameters that have a gradient which the unit has not reduced yet."""
    return {
        id(managed.sharded_param)
        for managed in _shown(module)
        if managed._unsharded_param.grad is not None or managed.unsharded_accumulated_grad is not None
    }


def _shown(module: Any) -> list[Any]:
    """Return what a unit manages of the parameters that a forward has shown."""
    return [
        managed
        for group in groups_of(module)
        for managed in group.fsdp_params
        if hasattr(managed, "_unsharded_param")
    ]


def data_ndim(module: Any) -> int:
    """Return how many axes the mesh has over which a unit's gradients are reduced."""
    groups = groups_of(module)
    return int(groups[0].mesh_info.mesh.ndim) if groups else 0


def has_named_dims(module: Any) -> bool:
    """Whether a unit was given a mesh of more than the data, and the names of the data's axes."""
    return any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in groups_of(module))


def is_inner(module: Any) -> bool:
    """Whether a forward has shown that a unit lies within a larger one."""
    return module._get_fsdp_state()._is_root is False


def has_run(module: Any) -> bool:
    """Whether a forward of the outermost unit has begun, ever."""
    return module._get_fsdp_state()._is_root is True


def reduce_unused(module: Any) -> None:
    """Let a unit reduce zeros of its trained parameters that have no gradient on this rank, as others may.

    torch before 2.13 has no setter for it; `SavedSettings.restore` ends it.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of(module):
        group.post_backward = partial(_reduce_with_zeros, group, group.post_backward)


def _reduce_with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    for managed in group.fsdp_params if group.reduce_grads else []:
        param: Any = getattr(managed, "_unsharded_param", None)
        has_none = param is not None and param.grad is None and managed.unsharded_accumulated_grad is None
        if has_none and param.requires_grad:
            param.grad = torch.zeros_like(param)
    post_backward(*unused)


def reset_iter_state(module: Any) -> None:
    """Let FSDP forget a forward or backward of the outermost unit that did not come to its end."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    # As torch 2.13 does it.
    root = module._get_fsdp_state()
    shared, comm = root._state_ctx, root._comm_ctx
    stream, idle = root._device_handle.current_stream(), type(root._training_state).IDLE
    # One reduce-scatter is under way in torch 2.11, and several in 2.12.
    scattered = [getattr(comm, "reduce_scatter_state", None), *getattr(comm, "reduce_scatter_states", [])]
    for left in [comm.all_gather_state, *scattered]:
        if left is not None and left.event is not None:
            stream.wait_event(left.event)
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_state"):
        comm.reduce_scatter_state = None
    else:
        comm.reduce_scatter_states.clear()
    comm.post_forward_order.clear()
    for state in shared.all_states:
        state._training_state = idle
        state._modules_to_run_forward.clear()
        for group in _groups_of(state):
            group.finalize_backward()  # waits
            if group._reshard_after_forward_event is not None:
                group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def state_id(module: Any) -> int:
    """Return what tells whether modules were given to `fully_shard` together."""
    return id(module._get_fsdp_state())


def reduce_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the type in which a unit's gradients are summed over micro-batches and ranks; None if it trains
    nothing.
    """
    for group in groups_of(module):
        policy = group.mp_policy
        for managed in group.fsdp_params:
            if managed.sharded_param.requires_grad:
                computed: torch.dtype = policy.param_dtype or managed.sharded_param.dtype
                return policy.reduce_dtype or computed
    return None


def compute_dtype(module: nn.Module, param: Parameter) -> torch.dtype:
    """Return the type in which a unit gathers a parameter."""
    policy = groups_of(module)[0].mp_policy
    dtype: torch.dtype = policy.param_dtype or param.dtype
    return dtype


def is_offloaded(module: nn.Module) -> bool:
    """Whether a unit keeps its shards and gradients on the host, and computes elsewhere."""
    return any(
        type(group.offload_policy).__name__ == "CPUOffloadPolicy"
        and any(managed.sharded_param.device.type != group.device.type for managed in group.fsdp_params)
        for group in groups_of(module)
    )


def has_reduce_hook(module: nn.Module) -> bool:
    """Whether somebody else looks at, or goes on with, what a unit has reduced."""
    return any(group._all_reduce_hook is not None for group in groups_of(module))


def has_own_reduce_scatter(module: nn.Module) -> bool:
    """Whether somebody has replaced torch's own reduce-scatter."""
    kinds = (type(group._reduce_scatter_comm) for group in groups_of(module))
    return any(not kind.__module__.startswith("torch.") for kind in kinds)


class SavedSettings:
    """A unit's settings as they were, to be put back.

    Args:
        module: the unit.
    """

    def __init__(self, module: Any) -> None:
        self._state = module._get_fsdp_state()
        self._automatic = self._state._auto_reshard_after_forward
        names = (*_REPLACED, *_SINCE_2_13)
        self._groups = [
            (group, {name: getattr(group, name) for name in names if hasattr(group, name)})
            for group in groups_of(module)
        ]

    @property
    def all_gather(self) -> Any:
        """How the unit gathers its parameters."""
        return self._groups[0][1]["_all_gather_comm"]

    @property
    def reduce_scatter(self) -> Any:
        """How the unit scatters its gradients' sum."""
        return self._groups[0][1]["_reduce_scatter_comm"]

    def restore_resharding(self) -> None:
        """Let parameters be freed after a forward as they were before."""
        state = self._state
        state._auto_reshard_after_forward = self._automatic
        # What torch decides itself at the first forward, which may have come since: the root is not freed.
        is_root = self._automatic and state._is_root is True
        for group, values in self._groups:
            group.post_forward_mesh_info = None if is_root else values["post_forward_mesh_info"]

    def restore(self) -> None:
        """Put everything back."""
        for group, values in self._groups:
            for name, value in values.items():
                setattr(group, name, value)
            vars(group).pop("post_backward", None)  # of `reduce_unused`
        self.restore_resharding()
