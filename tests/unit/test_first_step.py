"""A first step that is skipped leaves parameters and optimizer state as if it had never been called.

In these tests, uninitialized memory contains nan, so that a step that uses it is found.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pyengine as pe
from pyengine.step import stepper

pytestmark = pytest.mark.filterwarnings("ignore:.*the step was skipped")

# Arguments with which each optimizer of torch keeps all of its possible state.
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"lr": 0.1, "t0": 1.0, "weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adafactor": [{"lr": 0.1}],
    "Adagrad": [{"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.1}],
    "Adamax": [{"lr": 0.1}],
    "Muon": [{"lr": 0.1}],
    "NAdam": [{"lr": 0.1}],
    "RAdam": [{"lr": 0.1}],
    "RMSprop": [{"lr": 0.1, "momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 0.1}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
    ],
}
MODES: list[dict[str, bool]] = [
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"foreach": False, "capturable": True},
    {"foreach": True, "capturable": True},
    {"fused": True, "capturable": True},
]
# `sync.step` refuses these optimizers: their steps need a closure or sparse gradients.
_REFUSED = {"LBFGS", "SparseAdam"}

Make = Callable[[Any], Optimizer]


def _makers() -> Iterator[Any]:
    for name, each in ARGUMENTS.items():
        kind = getattr(torch.optim, name)
        known = set(inspect.signature(kind).parameters)
        for index, arguments in enumerate(each):
            modes = [mode for mode in MODES if mode.keys() <= known] or [{}]
            for mode in modes:
                keys = [key if value else f"no {key}" for key, value in mode.items()]
                label = "-".join([name, *([str(index)] if index else []), *keys])
                yield pytest.param(_maker(kind, arguments | mode), id=label)


def _maker(kind: type[Optimizer], arguments: dict[str, Any]) -> Make:
    return lambda params: kind(params, **arguments)  # type: ignore[call-arg]


def test_every_optimizer_of_torch_is_tried():
    kinds = {name for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    assert kinds - {"Optimizer"} - _REFUSED == set(ARGUMENTS)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # torch then fills uninitialized memory
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["the host waits", "the host is late"])
def is_late(request, monkeypatch):
    """Make the CPU a device that supports `capturable=True`; return whether the host runs ahead of it."""
    for name in ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    is_late = request.param == "the host is late"
    monkeypatch.setattr(stepper, "runs_ahead", lambda _: is_late)
    return is_late


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(3, 4, generator=generator))
        self.second = nn.Parameter(torch.randn(2, 3, generator=generator))
        with torch.no_grad():
            self.first[0, 0] = self.second[0, 0] = -0.0

    def loss(self, number: int, *, uses_second: bool = True) -> Tensor:
        """Return a loss whose gradients differ by window; the first element of each gradient is -0.0."""
        factors = torch.linspace(-1, 1, 12).reshape(3, 4) * (number + 1)
        factors[0, 0] = -0.0
        loss = (self.first * factors).sum()
        return loss + (self.second * factors[:2, :3]).sum() if uses_second else loss


def _engine(is_late: bool) -> tuple[pe.Sync, _Model]:
    model = _Model()
    sync = pe.GradSync(model, accumulate=1)
    sync._engine.is_late = is_late
    return sync, model


INF = {"factor": math.inf, "count": 1}
NO_COUNT = {"factor": 1.0, "count": 0}
SKIPS = {"inf": INF, "count 0": NO_COUNT}


def _window(
    sync: pe.Sync, loss: Tensor, optimizer: Optimizer, *, factor: float = 1.0, count: int = 1
) -> None:
    with sync.accumulate():
        sync.backward(loss * factor, count=count)
    sync.step(optimizer)


def _bits(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    named = {
        f"{name} {key}": value
        for name, param in model.named_parameters()
        for key, value in (("value", param), *optimizer.state.get(param, {}).items())
    }
    return {key: value.detach().clone().reshape(-1).view(torch.uint8) for key, value in named.items()}


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def _loaded(make: Make, optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer over the same parameters that has loaded this optimizer's state."""
    state = copy.deepcopy(optimizer.state_dict())
    other = make([param for group in optimizer.param_groups for param in group["params"]])
    other.load_state_dict(state)
    return other


def _bits_of_two_windows(sync: pe.Sync, model: _Model, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Train two windows; return the bits before and after each."""
    found = [_bits(model, optimizer)]
    for number in range(2):
        _window(sync, model.loss(number), optimizer)
        found.append(_bits(model, optimizer))
    sync.synchronize()
    return found


def _train(
    make: Make, is_late: bool, skip: dict[str, Any] | None, *, reloads: bool
) -> list[dict[str, Tensor]]:
    """Train two windows, after a skipped one if `skip`; return the bits before and after each of the two."""
    sync, model = _engine(is_late)
    with sync:
        optimizer = make(list(model.parameters()))
        if skip is not None:
            _window(sync, model.loss(5), optimizer, **skip)
        if reloads:
            optimizer = _loaded(make, optimizer)
        return _bits_of_two_windows(sync, model, optimizer)


@pytest.mark.parametrize("reloads", [False, True], ids=["goes on", "saved and loaded"])
@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
@pytest.mark.parametrize("make", [*_makers()])
def test_a_skipped_first_step_is_one_that_was_never_called(make, skip, reloads, is_late):
    found = _train(make, is_late, skip, reloads=reloads)
    for now, expected in zip(found, _train(make, is_late, None, reloads=reloads), strict=True):
        _assert_same(now, expected)


def _train_with_a_late_parameter(
    make: Make, is_late: bool, skip: dict[str, Any] | None, *, added: bool
) -> list[dict[str, Tensor]]:
    """Train as `_train` does, but first train a window that does not use the second parameter.

    The second parameter has its own group, because torch's fused SGD cannot begin with one parameter of a
    group later than with another. With `added`, the group is added after the first window.
    """
    sync, model = _engine(is_late)
    with sync:
        optimizer = make([{"params": [model.first]}])
        if not added:
            optimizer.add_param_group({"params": [model.second]})
        _window(sync, model.loss(5, uses_second=False), optimizer)
        if added:
            optimizer.add_param_group({"params": [model.second]})
        if skip is not None:
            _window(sync, model.loss(6), optimizer, **skip)
        return _bits_of_two_windows(sync, model, optimizer)


@pytest.mark.parametrize("added", [False, True], ids=["not used before", "added"])
@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
@pytest.mark.parametrize("make", [*_makers()])
def test_a_parameter_whose_first_step_is_skipped_later_keeps_no_state(make, skip, added, is_late):
    found = _train_with_a_late_parameter(make, is_late, skip, added=added)
    expected = _train_with_a_late_parameter(make, is_late, None, added=added)
    for now, right in zip(found, expected, strict=True):
        _assert_same(now, right)


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_momentum_that_a_checkpoint_does_not_have_is_not_made_in_a_skipped_step(skip, is_late):
    """A checkpoint has None from earlier releases of torch, or if momentum was 0."""
    make = _maker(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True})
    sync, model = _engine(is_late)
    with sync:
        optimizer = make(model.parameters())
        state = optimizer.state_dict() | {"state": {index: {"momentum_buffer": None} for index in range(2)}}
        optimizer.load_state_dict(state)
        _window(sync, model.loss(5), optimizer, **skip)
        assert all(optimizer.state[param]["momentum_buffer"] is None for param in model.parameters())
        _window(sync, model.loss(0), optimizer)
        assert all(torch.equal(optimizer.state[p]["momentum_buffer"], p.grad) for p in model.parameters())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_step_whose_state_is_there_is_skipped_by_itself(momentum, is_late):
    sync, model = _engine(is_late)
    with sync:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, fused=True)
        _window(sync, model.loss(0), optimizer)
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
            _window(sync, model.loss(1), optimizer, **INF)
        assert step.call_count == 1
