"""What the engine does with an accelerator's streams, as far as the host can check it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import pyengine as pe
from pyengine.engine import parameters


@pytest.fixture
def on(monkeypatch):
    """Return a function that makes another stream the current one."""
    return lambda stream: monkeypatch.setattr(parameters, "current_stream", lambda device: stream)


def _window(model: nn.Module, sync: pe.Sync) -> None:
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    sync.unscale_()


@pytest.mark.parametrize("then", ["first", "second"])
def test_gradients_are_accumulated_on_the_stream_that_a_window_is_opened_on(on, then):
    on("first")
    model = nn.Linear(2, 2)
    sync = pe.GradSync(model, accumulate=1)
    get_gradient_edge(model.weight).node.metadata["mark"] = True
    on(then)
    with sync.accumulate():
        assert ("mark" in get_gradient_edge(model.weight).node.metadata) == (then == "first")
        sync.backward(model(torch.ones(1, 2)).sum())


def test_parameters_keep_their_owner_on_another_stream_also_while_one_is_frozen(on):
    on("first")
    model = nn.Linear(2, 2)
    sync = pe.GradSync(model, accumulate=1)
    on("second")
    _window(model, sync)
    with pytest.raises(ValueError, match="belongs to an engine that still exists"):
        pe.GradSync(model, accumulate=1)
    model.bias.requires_grad_(False)
    on("third")
    _window(model, sync)
    assert torch.equal(model.weight.grad, 2 * torch.ones(2, 2))
    sync.close()
    pe.GradSync(model, accumulate=1)
