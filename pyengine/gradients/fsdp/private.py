"""Access to private state of FSDP2; the state is restored when the engine is closed.

Tested with torch 2.11 to 2.15. During a window only public methods are used. Two of these methods are new in
torch 2.13; in earlier versions `reduce_unused` and `reset_iter_state` replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

# Public setters that a window needs.
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
# Attributes that the setters change.
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
# An attribute that a setter changes, new in torch 2.13.
_SINCE_2_13 = ("reduce_scatter_unused_params",)
# Attributes that are only read.
_READ = ("mesh_info", "offload_policy", "device", "_partial_reduce_output")


def is_unit(module: object) -> bool:
    """Whether `fully_shard` or `replicate` was called on a module."""
    # Compare class names, because importing the class takes longer than importing this package.
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def missing(module: Any) -> list[str]:
    """Return the names of required attributes that this version of torch does not have."""
    names = [name for name in _NEEDED if not hasattr(module, name)]
    names += [] if hasattr(torch.Tensor, "grad_dtype") else ["Tensor.grad_dtype"]
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if not hasattr(state, "_fsdp_param_group"):
        return [*names, "_fsdp_param_group"]
    groups = _groups_of(state)
    return names + [name for group in groups for name in (*_REPLACED, *_READ) if not hasattr(group, name)]


def groups_of(module: Any) -> list[Any]:
    """Return the parameter groups that a unit reduces, one per mesh."""
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    # torch 2.11 has at most one group.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else list(groups)


def parameters_of(module: Any) -> list[Parameter]:
    """Return the sharded parameters that a unit manages."""
    return [managed.sharded_param for group in groups_of(module) for managed in group.fsdp_params]


def reduced_parameters(module: Any, waiting: Collection[int] = ()) -> list[Parameter]:
    """Return the sharded parameters whose gradients a unit reduces.

    A unit reduces parameters that a forward has unsharded and that either require a gradient or still hold a
    gradient from before they were frozen. `waiting` contains the ids that `waiting_parameters` returned
    before this backward.
    """
    return [
        managed.sharded_param
        for managed in _shown(module)
        if managed._unsharded_param.requires_grad or id(managed.sharded_param) in waiting
    ]


def waiting_parameters(module: Any) -> set[int]:
    """Return the ids of sharded parameters whose gradient has not been reduced yet."""
    return {
        id(managed.sharded_param)
        for managed in _shown(module)
        if managed._unsharded_param.grad is not None or managed.unsharded_accumulated_grad is not None
    }


def _shown(module: Any) -> list[Any]:
    """Return the `FSDPParam` objects of the parameters that a forward has unsharded, in reduction order."""
    found = []
    for group in groups_of(module):
        # Since torch 2.15, gradients of the same dtype are adjacent.
        order = getattr(group, "_reduce_scatter_param_indices", None) or range(len(group.fsdp_params))
        found += [group.fsdp_params[index] for index in order]
    return [managed for managed in found if hasattr(managed, "_unsharded_param")]


def data_ndim(module: Any) -> int:
    """Return the number of mesh axes over which a unit's gradients are reduced."""
    groups = groups_of(module)
    return int(groups[0].mesh_info.mesh.ndim) if groups else 0


def has_named_dims(module: Any) -> bool:
    """Whether the mesh of a unit has axes that are not data-parallel."""
    return any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in groups_of(module))


def is_inner(module: Any) -> bool:
    """Whether a unit is nested in a larger unit; known after a forward."""
    return module._get_fsdp_state()._is_root is False


def has_run(module: Any) -> bool:
    """Whether any forward of the outermost unit has begun."""
    return module._get_fsdp_state()._is_root is True


def reduce_unused(module: Any) -> None:
    """Make a unit reduce zeros for parameters without a gradient.

    Other ranks may have gradients for these parameters. Before 2.13, torch has no setter for this behavior.
    `SavedSettings.restore` undoes the change.
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


def allow_unused_units(module: Any) -> None:
    """Let a backward without reductions skip parameters that no forward has unsharded yet.

    Without this change torch 2.11 to 2.14 raises AttributeError for such parameters if the policy has a
    `reduce_dtype`. `SavedSettings.restore` undoes the change.
    """
    for group in groups_of(module):
        for managed in group.fsdp_params:
            if hasattr(managed, "to_accumulated_grad_if_needed"):
                widen = managed.to_accumulated_grad_if_needed
                managed.to_accumulated_grad_if_needed = partial(_widen_if_unsharded, managed, widen)


def _widen_if_unsharded(managed: Any, widen: Callable[[], None]) -> None:
    if hasattr(managed, "_unsharded_param"):
        widen()


def keep_grad_dtypes(module: Any) -> None:
    """Prevent backwards from changing `grad_dtype` of unsharded parameters, which the engine sets.

    Torch changes it since 2.15. `SavedSettings.restore` undoes the change.
    """
    for group in groups_of(module):
        if hasattr(group, "_set_unsharded_grad_dtypes"):
            group._set_unsharded_grad_dtypes = lambda **_: None


def reset_iter_state(module: Any) -> None:
    """Discard the state of an unfinished forward or backward of the outermost unit; sharded `.grad` stays."""
    root = module._get_fsdp_state()
    shared = root._state_ctx
    if hasattr(module, "reset_iter_state"):
        groups = [group for state in shared.all_states for group in _groups_of(state)]
        params = [managed.sharded_param for group in groups for managed in group.fsdp_params]
        grads = [param.grad for param in params]
        module.reset_iter_state()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad  # torch 2.15 sets it to None
        return
    # The same operations as in torch 2.13.
    comm = root._comm_ctx
    stream, idle = root._device_handle.current_stream(), type(root._training_state).IDLE
    # torch 2.11 runs one reduce-scatter at a time, and torch 2.12 may run several.
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
            group.finalize_backward()  # waits for the reduce-scatters
            if group._reshard_after_forward_event is not None:
                group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def state_id(module: Any) -> int:
    """Return the id of a module's FSDP state, which all modules of one `fully_shard` call share."""
    return id(module._get_fsdp_state())


def reduce_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a unit sums gradients; None if the unit trains no parameter."""
    for group in groups_of(module):
        for managed in group.fsdp_params:
            if managed.sharded_param.requires_grad:
                return reduce_dtype_of(managed.mp_policy, managed.sharded_param.dtype)
    return None


def reduce_dtype_of(policy: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a policy sums the gradients of parameters that are sharded in `dtype`."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    # Without a `reduce_dtype`, torch sums in the dtype of forwards, and since 2.15 in that of the shards.
    default = dtype if hasattr(FSDPParam, "unsharded_grad_dtype") else policy.param_dtype or dtype
    found: torch.dtype = policy.reduce_dtype or default
    return found


def compute_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Return the dtype of each parameter in forwards, in the order of `parameters_of`."""
    return [
        managed.mp_policy.param_dtype or managed.sharded_param.dtype
        for group in groups_of(module)
        for managed in group.fsdp_params
    ]


def is_offloaded(module: nn.Module) -> bool:
    """Whether a unit keeps shards and gradients on the host and computes on another device."""
    return any(
        type(group.offload_policy).__name__ == "CPUOffloadPolicy"
        and any(managed.sharded_param.device.type != group.device.type for managed in group.fsdp_params)
        for group in groups_of(module)
    )


def has_reduce_hook(module: nn.Module) -> bool:
    """Whether code outside the engine has set a hook on a unit's reduction."""
    return any(group._all_reduce_hook is not None for group in groups_of(module))


def has_own_reduce_scatter(module: nn.Module) -> bool:
    """Whether other code has replaced torch's reduce-scatter."""
    kinds = (type(group._reduce_scatter_comm) for group in groups_of(module))
    return any(not kind.__module__.startswith("torch.") for kind in kinds)


class SavedSettings:
    """The settings of a unit before the engine was created, to be restored later."""

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
        return self._groups[0][1]["_all_gather_comm"]

    @property
    def reduce_scatter(self) -> Any:
        return self._groups[0][1]["_reduce_scatter_comm"]

    def restore_resharding(self) -> None:
        """Restore whether the unit reshards its parameters after a forward."""
        state = self._state
        state._auto_reshard_after_forward = self._automatic
        # torch makes this decision in the first forward, which may have run in the meantime, and does not
        # reshard the root module.
        is_root = self._automatic and state._is_root is True
        for group, values in self._groups:
            group.post_forward_mesh_info = None if is_root else values["post_forward_mesh_info"]

    def restore(self) -> None:
        for group, values in self._groups:
            for name, value in values.items():
                setattr(group, name, value)
            vars(group).pop("post_backward", None)  # set by `reduce_unused`
            vars(group).pop("_set_unsharded_grad_dtypes", None)  # set by `keep_grad_dtypes`
            for managed in group.fsdp_params:
                vars(managed).pop("to_accumulated_grad_if_needed", None)  # set by `allow_unused_units`
        self.restore_resharding()
