"""A skipped step leaves no trace on a device that the host does not read; the tests use the CPU.

Steps that cannot be undone are refused, and the remedy that the message names works.
"""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer

from pyengine.step.rollback import RollbackStepper

_REFUSED = {"Optimizer", "LBFGS", "SparseAdam"}  # by `sync.step`
KINDS = [kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and name not in _REFUSED]


@pytest.fixture(autouse=True)
def cpu_is_xla(monkeypatch):
    """Make torch allow `capturable=True` on the CPU exactly if torch allows it on XLA devices."""
    for name in ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"):
        monkeypatch.setattr(
            importlib.import_module(f"torch.optim.{name}"),
            "_get_capturable_supported_devices",
            lambda supports_xla=True: ["cpu"] if supports_xla else ["cuda"],
        )


def _param(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0, **options).reshape(2, 3))


def _step(
    stepper: RollbackStepper, optimizer: Optimizer, *, grad: float, skipped: bool = False, used: bool = True
) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, torch.nan if skipped else grad)
    final: Any = SimpleNamespace(found_inf=torch.tensor(float(skipped)), used=torch.tensor([used]))
    stepper.step(optimizer, final)


def _stepper(param: nn.Parameter, *, always_waits: bool = False) -> RollbackStepper:
    return RollbackStepper({id(param): 0}, always_waits=always_waits)


def _values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {"value": param, **optimizer.state.get(param, {})}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def _assert_same(optimizer: Optimizer, plain: Optimizer) -> None:
    for found, expected in zip(_values(optimizer), _values(plain), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value, key


def _train(kind: type[Optimizer], options: dict[str, Any], *, always_waits: bool = False) -> None:
    """Train with skipped windows, including the first one, and compare with a plain optimizer."""
    param, twin = _param(), _param()
    stepper = _stepper(param, always_waits=always_waits)
    optimizer, plain = kind([param], **options), kind([twin], **options)
    for index, skipped in enumerate([True, False, True, False]):
        _step(stepper, optimizer, grad=index + 1.0, skipped=skipped)
        if not skipped:
            twin.grad = torch.full_like(twin, index + 1.0)
            plain.step()
    _assert_same(optimizer, plain)


def _modes() -> list[Any]:
    each = [(kind, mode) for kind in KINDS for mode in ({}, {"foreach": True}, {"fused": True})]
    return [
        pytest.param(kind, mode, id="-".join([kind.__name__, *mode]))
        for kind, mode in each
        if mode.keys() <= inspect.signature(kind).parameters.keys()
    ]


@pytest.mark.parametrize(("kind", "mode"), _modes())
def test_an_optimizer_skips_its_first_step_or_the_remedy_for_it_works(kind, mode):
    try:
        _train(kind, mode)
    except ValueError as error:
        remedy = str(error).partition(": ")[0]
        if remedy.startswith("make the engine with nonfinite='raise'"):
            _train(kind, mode, always_waits=True)
        else:
            options = {key: value == "True" for key, value in re.findall(r"(\w+)=(True|False)", remedy)}
            assert options["capturable"]
            _train(kind, mode | options)


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        (AdamW, {}, r"^use AdamW\(..., capturable=True\): with capturable=False AdamW counts its steps on "),
        (Adam, {"foreach": True}, r"^use Adam\(..., capturable=True, foreach=False\): "),
        (Adam, {"fused": True}, r"^use Adam\(..., capturable=True, fused=False\): "),
        (Adadelta, {}, r"^make the engine with nonfinite='raise', .*: Adadelta counts its steps on the host"),
        (Adadelta, {"capturable": True}, "^make the engine with nonfinite='raise'"),
    ],
)
def test_an_optimizer_that_counts_on_the_host_is_refused_before_it_steps(kind, options, remedy):
    param = _param()
    optimizer = kind([param], **options)
    with pytest.raises(ValueError, match=remedy):
        _step(_stepper(param), optimizer, grad=1.0)
    assert torch.equal(param, _param())


def test_state_that_is_on_the_host_is_refused():
    param = _param(device="meta")
    optimizer = Adagrad([param])  # its `step` is on the host
    stepper = _stepper(param)
    with pytest.raises(ValueError, match="nonfinite='raise', .*: Adagrad keeps 'step' on the host, where"):
        _step(stepper, optimizer, grad=1.0)


# ---- state that a later step creates ----


@pytest.mark.parametrize(("skipped", "used"), [(True, True), (False, False), (False, True)])
def test_momentum_that_is_switched_on_later_is_that_of_steps_that_were_not_skipped(skipped, used):
    param, twin = _param(), _param()
    stepper = _stepper(param)
    optimizer, plain = SGD([param], lr=0.5), SGD([twin], lr=0.5)
    for index, counts in enumerate([True, used and not skipped, True]):
        _step(
            stepper,
            optimizer,
            grad=index + 1.0,
            skipped=skipped and index == 1,
            used=used or index != 1,
        )
        if counts:
            twin.grad = torch.full_like(twin, index + 1.0)
            plain.step()
        _assert_same(optimizer, plain)
        optimizer.param_groups[0]["momentum"] = plain.param_groups[0]["momentum"] = 0.5


@pytest.mark.parametrize("skipped", [True, False])
def test_the_state_of_a_fresh_optimizer_can_be_loaded_later(skipped):
    param = _param()
    stepper = _stepper(param)
    optimizer = SGD([param], lr=0.5, momentum=0.5)
    fresh = optimizer.state_dict()
    _step(stepper, optimizer, grad=1.0)
    optimizer.load_state_dict(fresh)
    before = param.detach().clone()
    _step(stepper, optimizer, grad=3.0, skipped=skipped)
    assert (not optimizer.state.get(param)) == skipped
    assert torch.equal(param, before if skipped else before - 1.5)


class _Replaces(Optimizer):
    """An optimizer that replaces its state in every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            total = self.state[param].get("total", torch.zeros_like(param))
            self.state[param]["total"] = total + param.grad
            param -= self.state[param]["total"]


def test_state_that_every_step_replaces_is_undone():
    _train(_Replaces, {})
