"""`GradVersions` finds every gradient that was replaced or written to, with and without the core."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn

from pyengine.gradients import marks
from pyengine.gradients.marks import GradVersions
from pyengine.gradients.published import Published
from pyengine.ops import native

CHANGES = {
    "nothing": (lambda params: None, []),
    "added in place": (lambda params: params[1].grad.add_(1), [1]),
    "zeroed": (lambda params: [param.grad.zero_() for param in params[:2]], [0, 1]),
    "replaced": (lambda params: setattr(params[0], "grad", params[0].grad.clone()), [0]),
    "removed": (lambda params: setattr(params[1], "grad", None), [1]),
    "new": (lambda params: setattr(params[2], "grad", torch.ones(3)), [2]),
    "exchanged": (
        lambda params: [
            setattr(param, "grad", grad)
            for param, grad in zip(params[:2], [params[1].grad, params[0].grad], strict=True)
        ],
        [0, 1],
    ),
}


@pytest.fixture(params=["core", "python"])
def reader(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(marks, "grad_states", lambda params: None)
    elif not native.can_gather():
        pytest.skip("built without the extension")


def _params() -> list[nn.Parameter]:
    """Return parameters of one shape, of which the last has no gradient."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for param in params[:2]:
        param.grad = torch.ones(3)
    return params


@pytest.mark.parametrize(("change", "indices"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("records", [1, 2], ids=["recorded once", "recorded again"])
def test_changes_since_the_last_record_are_found(reader, change, indices, records):
    params = _params()
    versions = GradVersions(params)
    for _ in range(records - 1):
        params[0].grad.add_(1)
        versions.record()
    change(params)
    assert versions.changed() == indices
    versions.record()
    assert versions.changed() == []


def test_a_gradient_at_the_address_of_a_freed_one_is_another(monkeypatch):
    """With what the core reads where every new gradient has the address and version of a freed one."""
    has_recorded = iter([False, True, True])
    same = SimpleNamespace(
        record=lambda params: next(has_recorded), is_unchanged=lambda params: True, versions=lambda: [0]
    )
    monkeypatch.setattr(marks, "grad_states", lambda params: same)
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    versions = GradVersions([param])
    for _ in range(2):
        assert versions.changed() == []
        param.grad = None
        param.grad = torch.ones(3)
        assert versions.changed() == [0]
        versions.record()


def test_no_gradient_is_kept_alive(reader):
    params = _params()
    versions, grad = GradVersions(params), ref(params[0].grad)
    params[0].grad = None
    assert grad() is None and versions.changed() == [0]


def test_a_record_keeps_no_cycle_alive(reader):
    params = _params()
    params[0].versions = GradVersions(params)  # as an engine that a parameter's hook refers to
    param = ref(params[0])
    del params
    gc.collect()
    assert param() is None


def test_a_parameter_with_a_grad_of_its_own_is_read_by_python():
    class Part:
        grad = None

    assert native.grad_states([Part()]) is None
    assert GradVersions([Part()]).changed() == []


class Wrapper(torch.Tensor):
    """A tensor without memory, as DTensor is."""

    @staticmethod
    def __new__(cls, size):
        return torch.Tensor._make_wrapper_subclass(cls, size)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_gradient_without_memory_is_compared_by_identity_and_version_alone(reader):
    params = _params()
    params[1].grad = Wrapper((3,))
    versions = GradVersions(params)
    assert not versions.sees_memory and versions.changed() == []
    params[1].grad = Wrapper((3,))
    assert versions.changed() == [1]


@pytest.mark.parametrize("as_sparse", [False, True], ids=["dense", "sparse"])
def test_an_assignment_to_the_memory_of_a_gradient_is_a_change(reader, as_sparse):
    params = _params()
    if as_sparse:
        params[1].grad = torch.ones(3).to_sparse()  # read by Python, with the others
    published = Published(["a", "b", "c"], params)
    assert not published.has_changed()
    params[0].grad.data = torch.full((3,), 2.0)
    assert published.has_changed()
    published.record()
    assert not published.has_changed()
