"""Errors for training that has no effect: replaced parameters, and gradients removed in the backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cases import recorded_warnings
from ranks import Ranks, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def _made(door: str, model: nn.Module, *, accumulate: int) -> tuple[nn.Module, Any]:
    if door == "attach":
        ddp = DistributedDataParallel(model)
        return ddp, pe.attach(ddp, accumulate=accumulate)
    if door == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        return model, pe.attach(model, accumulate=accumulate)
    source: Any = model if door == "GradSync" else model.parameters()
    return model, pe.GradSync(source, accumulate=accumulate)


def _replace(model: nn.Sequential) -> None:
    model[1].weight = Parameter(torch.ones(1, 2))


def _frozen_copy(model: nn.Sequential) -> None:
    model[0].average = nn.Linear(2, 2)  # trainable, but no loss depends on it


def _hooked(hook: Callable[[Parameter], None], *, only: int | None = None) -> Callable[[nn.Sequential], None]:
    def change(model: nn.Sequential) -> None:
        for param in [*model.parameters()][slice(None) if only is None else slice(only, only + 1)]:
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[arg-type]

    return change


def _step(param: Parameter) -> None:
    torch.optim.SGD([param], lr=0.5).step()


def _step_and_zero(param: Parameter) -> None:
    _step(param)
    assert param.grad is not None
    param.grad.zero_()


def _step_and_clear(param: Parameter) -> None:
    _step(param)
    param.grad = None


def _clear(param: Parameter) -> None:
    param.grad = None


def _look(param: Parameter) -> None:
    assert param.grad is not None


def _in_backward(model: nn.Sequential) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def _clear_by_nodes(model: nn.Sequential) -> None:
    model.kept = [  # type: ignore[assignment]
        (edge.node, edge.node.register_hook(lambda *_, param=param: _clear(param)))
        for param in model.parameters()
        for edge in [torch.autograd.graph.get_gradient_edge(param)]
    ]


_CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    ),
    "a parameter": _replace,
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model[1]),
    "swap_tensors": lambda model: torch.utils.swap_tensors(model[1].weight, Parameter(torch.ones(1, 2))),
    "a layer in use": lambda model: model.add_module("2", nn.Linear(1, 1)),
    "step and clear": _hooked(_step_and_clear),
    "step": _hooked(_step),
    "step and zero": _hooked(_step_and_zero),
    "clear one": _hooked(_clear, only=0),
    "in the backward": _in_backward,
    "clear by nodes": _clear_by_nodes,
    "spectral_norm": lambda model: nn.utils.parametrizations.spectral_norm(model[1]),
    "a layer out of use": _frozen_copy,
    "look": _hooked(_look),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
}


def _windows(door: str, what: str, accumulate: int, changed: int = -1) -> list[str]:
    """Return the errors of two windows, or "stepped"; `changed` is the rank with the change (-1: all)."""
    torch.manual_seed(0)
    model = _model()
    called, sync = _made(door, model, accumulate=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if changed in (-1, rank):
        _CHANGES[what](model)
    found = []
    for _ in range(2):
        try:
            for window in sync.windows([torch.ones(1, 2)] * accumulate):
                for x in window:
                    sync.backward(called(x).sum())
                sync.step(optimizer)
            found.append("stepped")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
            sync.abandon()
    return found


ASSIGN = "load_state_dict(assign=True)"
HOOK = "a hook registered with register_post_accumulate_grad_hook has removed the gradient of '"


@pytest.mark.parametrize(
    ("world", "door", "what", "accumulate", "changed", "says"),
    [
        (1, "GradSync", ASSIGN, 2, -1, "parameters '0.weight' and 3 more have been replaced"),
        (1, "attach", "a parameter", 2, -1, "parameter '1.weight' has been replaced"),
        (1, "GradSync", "weight_norm", 2, -1, "parameter '1.weight' has been replaced"),
        (2, "fully_shard", ASSIGN, 1, -1, "parameters '0.weight' and 3 more have been replaced"),
        (2, "GradSync", "fully_shard", 1, -1, "all ranks: parameters '0.weight' and 3 more have been"),
        (2, "GradSync", "swap_tensors", 1, 1, "rank 1: parameter '1.weight' has been replaced"),
        (2, "GradSync", "in the backward", 1, 0, "rank 0: parameter '0.weight' has an optimizer that steps"),
        (1, "GradSync", "step and clear", 1, -1, HOOK),
        (1, "attach", "step and clear", 2, -1, HOOK),
        (1, "parameters", "clear one", 2, -1, HOOK),
        # On one rank, after the header.
        (2, "GradSync", "clear one", 1, 1, f"rank 1: {HOOK}0.weight'"),
        (2, "attach", "clear one", 1, 1, f"rank 1: {HOOK}0.weight'"),
        (2, "fully_shard", "clear one", 1, 1, f"rank 1: {HOOK}0.weight'"),
        (2, "parameters", ASSIGN, 1, -1, "no rank has any gradient, so nothing was trained"),
        (2, "parameters", "clear by nodes", 1, -1, "no rank has any gradient, so nothing was trained"),
    ],
)
def test_what_trains_nothing_is_an_error_of_every_window_on_every_rank(
    ranks: Ranks, world, door, what, accumulate, changed, says
):
    for found in ranks(world).run(_windows, door, what, accumulate, changed):
        assert all(says in text and "freeze '" not in text for text in found)


def test_a_layer_added_later_is_named_once_it_has_a_gradient():
    (first, *_) = _windows("GradSync", "a layer in use", 1)
    assert "call sync.close() and make a new engine, or freeze '2.weight'" in first


@pytest.mark.parametrize(
    ("world", "door", "what", "changed"),
    [
        (1, "GradSync", "spectral_norm", -1),
        (1, "attach", "spectral_norm", -1),
        *((1, *each, -1) for each in product(["GradSync", "attach"], ["a layer out of use", "look"])),
        (2, "parameters", ASSIGN, 0),  # the other rank has gradients
    ],
)
def test_what_leaves_parameters_and_gradients_alone_is_no_error(ranks: Ranks, world, door, what, changed):
    assert ranks(world).run(_windows, door, what, 2, changed) == [["stepped"] * 2] * world


@pytest.mark.parametrize("what", ["step", "step and zero"])
@pytest.mark.parametrize("door", ["GradSync", "attach", "fully_shard"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_hook_that_steps_and_leaves_a_gradient_is_refused(ranks: Ranks, door, what, accumulate):
    for found in ranks(2).run(_windows, door, what, accumulate, 1):
        assert "rank 1: a hook registered with register_post_accumulate_grad_hook has written to" in found[0]
        assert "load the parameters again" in found[0]


@on_ranks(1)
def test_a_parameter_with_a_hook_may_be_frozen_later():
    model = _model()
    _hooked(_look)(model)
    called, sync = _made("GradSync", model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, window in enumerate(sync.windows([torch.ones(1, 2)] * 2)):
        model[0].requires_grad_(number == 0)
        for x in window:
            sync.backward(called(x).sum())
        assert bool(sync.step(optimizer))


@pytest.mark.parametrize("door", ["GradSync", "attach"])
@on_ranks(1)
def test_an_optimizer_in_the_backward_is_refused_where_the_engine_is_made(door):
    model = _model()
    _in_backward(model)
    with pytest.raises(ValueError, match="has an optimizer that steps inside the backward"):
        _made(door, model, accumulate=1)


def test_gradients_of_zero_are_gradients():
    weight = Parameter(torch.ones(2))
    sync = pe.GradSync([weight])
    with sync.accumulate():
        sync.backward((weight * 0).sum())
    assert bool(sync.step(torch.optim.SGD([weight], lr=1.0)))


def test_what_is_cleared_after_its_bucket_could_leave_is_named():
    (found, _) = _windows("parameters", "clear by nodes", 2)
    assert "was set to None inside the backward" in found


def _three_steps(change: Callable[[nn.Sequential], None]) -> list[str]:
    """Return the warnings of three steps with an engine that was given only parameters."""
    model = _model()
    sync = pe.GradSync(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change(model)
    with recorded_warnings() as texts:
        for window in sync.windows([torch.ones(1, 2)] * 3):
            for x in window:
                sync.backward(model(x).sum())
            sync.step(optimizer)
    return texts


def test_of_an_engine_of_parameters_one_that_was_replaced_is_warned_of_and_frozen_ones_are_not():
    (text,) = _three_steps(_replace)
    assert text.startswith("no rank had a gradient for parameter 'param2' in 3 steps in a row")
    assert _three_steps(lambda model: model[1].requires_grad_(False)) == []
