"""`GradVersions` finds every gradient that was replaced or written to."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import nn

from pyengine.gradients.grad_versions import GradVersions
from pyengine.gradients.published import Published

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


def _params() -> list[nn.Parameter]:
    """Return parameters of equal shape; the last one has no gradient."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for param in params[:2]:
        param.grad = torch.ones(3)
    return params


def _versions(params: list[nn.Parameter]) -> GradVersions:
    versions = GradVersions(params)
    versions.record()
    return versions


@pytest.mark.parametrize(("change", "indices"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("records", [1, 2], ids=["recorded once", "recorded again"])
def test_changes_since_the_last_record_are_found(change, indices, records):
    params = _params()
    versions = _versions(params)
    for _ in range(records - 1):
        params[0].grad.add_(1)
        versions.record()
    change(params)
    assert versions.changed() == indices
    versions.record()
    assert versions.changed() == []


def test_no_gradient_is_kept_alive():
    params = _params()
    versions, grad = _versions(params), ref(params[0].grad)
    params[0].grad = None
    assert grad() is None and versions.changed() == [0]


def test_a_record_keeps_no_cycle_alive():
    params = _params()
    params[0].versions = _versions(params)  # like an engine that a parameter's hook refers to
    param = ref(params[0])
    del params
    gc.collect()
    assert param() is None


@pytest.mark.parametrize("as_sparse", [False, True], ids=["dense", "sparse"])
def test_an_assignment_to_the_memory_of_a_gradient_is_a_change(as_sparse):
    params = _params()
    if as_sparse:
        params[1].grad = torch.ones(3).to_sparse()
    published = Published(["a", "b", "c"], params)
    assert not published.has_changed()
    params[0].grad.data = torch.full((3,), 2.0)
    assert published.has_changed()
    published.record()
    assert not published.has_changed()
