"""A step that must not be used is undone on the device: parameters and optimizer state keep their bits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from pyengine.step import stepper
from pyengine.step.stepper import PlainStepper, _planned, _written, allocate, runs_user_code, undoing

MAKE = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "SGD foreach": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "Adam amsgrad": lambda params: Adam(params, amsgrad=True),
    "AdamW foreach": lambda params: AdamW(params, foreach=True),
    "Adadelta": Adadelta,
    "Muon": lambda params: Muon(params[:1]),
}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator) for shape in ((5, 7), (1,), (0,), (2, 3, 4, 4))]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def fill_gradients(params, value=None):
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, (index + 1) / 8 if value is None else value)


def tensors_of(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [tensor for p in params for tensor in (p, *optimizer.state.get(p, {}).values())]


def bits(optimizer):
    return [tensor.detach().clone() for tensor in tensors_of(optimizer)]


def step_with_undo(optimizer, found_inf):
    targets = _planned(_written(optimizer))
    with undoing(targets, allocate(targets), torch.tensor(found_inf)):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [*((make, torch.float32) for make in MAKE.values()), (MAKE["SGD momentum"], torch.bfloat16)],
)
def test_a_skipped_step_leaves_the_bits_of_parameters_and_state(make, dtype):
    params = parameters(dtype)
    optimizer = make(params)
    fill_gradients(params)
    optimizer.step()
    before = bits(optimizer)
    fill_gradients(params, torch.nan)
    step_with_undo(optimizer, 1.0)
    for tensor, want in zip(tensors_of(optimizer), before, strict=True):
        assert torch.equal(tensor, want)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_step_that_is_not_skipped_has_the_bits_of_a_plain_one(make):
    params, plain_params = parameters(), parameters()
    optimizer, plain = make(params), make(plain_params)
    for both in ((params, optimizer), (plain_params, plain)):
        fill_gradients(both[0])
        both[1].step()
        fill_gradients(both[0])
    step_with_undo(optimizer, 0.0)
    plain.step()
    for tensor, want in zip(tensors_of(optimizer), tensors_of(plain), strict=True):
        assert torch.equal(tensor, want)


def test_autograd_notices_that_a_step_was_undone():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    loss = (weight * weight).sum()
    step_with_undo(SGD([weight], lr=0.0), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- which optimizers are undone ----


@pytest.mark.parametrize("make", [MAKE["SGD"], MAKE["SGD momentum"], Muon])
def test_a_step_without_state_on_the_host_can_be_undone_once_its_state_is_there(make):
    params = parameters()[:1]
    optimizer = make(params)
    fill_gradients(params)
    optimizer.step()
    assert PlainStepper().targets(optimizer) is not None


def _first_step_with_momentum(params):
    return SGD(params, lr=0.1, momentum=0.9)


class _Own(SGD):
    pass


def _stepped(make):
    def make_and_step(params):
        optimizer = make(params)
        optimizer.step()
        return optimizer

    return make_and_step


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_first_step_with_momentum, id="state is yet to be made"),
        pytest.param(_stepped(lambda p: AdamW(p, foreach=True)), id="capturable=False"),
        pytest.param(_stepped(lambda p: _Own(p, lr=0.1)), id="a subclass"),
    ],
)
def test_a_step_that_could_not_be_undone_whole_is_not(make):
    params = parameters()
    fill_gradients(params)
    assert PlainStepper().targets(make(params)) is None


def test_state_on_the_host_cannot_be_undone():
    weight = nn.Parameter(torch.ones(2, device="meta"))
    weight.grad = torch.ones(2, device="meta")
    optimizer = Adagrad([weight])  # its `step` is on the host
    assert PlainStepper().targets(optimizer) is None


def _hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def _patched(optimizer):
    optimizer.step = lambda: None


@pytest.mark.parametrize("change", [_hooked, _patched])
def test_a_step_with_code_of_the_user_s_inside_waits(change):
    optimizer = SGD(parameters(), lr=0.1)
    LambdaLR(optimizer, lambda _: 1.0)
    assert not runs_user_code(optimizer)
    change(optimizer)
    assert runs_user_code(optimizer)


def test_other_state_is_looked_at_again():
    params = parameters()[:1]
    optimizer, undo = SGD(params, lr=0.1, momentum=0.9), PlainStepper()
    fill_gradients(params)
    optimizer.step()
    assert undo.targets(optimizer) is undo.targets(optimizer)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: {"momentum_buffer": torch.ones(5, 7)}}})
    ((_, pointers),) = undo.targets(optimizer)
    assert pointers.tensors[1].data_ptr() == optimizer.state[params[0]]["momentum_buffer"].data_ptr()


class _Unread(torch.Tensor):
    """A flag that raises if the host reads it."""

    def __bool__(self):
        raise AssertionError("the host has waited for the device")


@pytest.fixture
def runs_ahead(monkeypatch):
    monkeypatch.setattr(stepper, "runs_ahead", lambda device: True)


def changed_by_a_step(found_inf):
    """Return the set of answers to whether a step with SGD changes a parameter."""
    params = parameters()
    optimizer, before = SGD(params, lr=0.1), [p.detach().clone() for p in params]
    fill_gradients(params)
    plain = PlainStepper()
    assert not plain.needs_host(optimizer)
    plain.step(optimizer, SimpleNamespace(found_inf=found_inf))
    return {not torch.equal(p, old) for p, old in zip(params, before, strict=True) if p.numel()}


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_host_does_not_read_the_decision_where_a_step_can_be_undone(runs_ahead, found_inf):
    unread = torch.tensor(found_inf).as_subclass(_Unread)
    with pytest.raises(AssertionError, match="has waited"):
        bool(unread)
    assert changed_by_a_step(unread) == {not found_inf}


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_without_memory_for_the_copies_the_host_waits(runs_ahead, monkeypatch, found_inf):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", no_memory)
    assert changed_by_a_step(torch.tensor(found_inf)) == {not found_inf}
