"""What the engine does with an accelerator's streams, as far as the host can check it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import pyengine as pe
from pyengine.engine import parameters


def _made_under(stream: str, then: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a window opened under stream `then` still accumulates where the engine was made."""
    monkeypatch.setattr(parameters, "current_stream", lambda device: stream)
    model = nn.Linear(2, 2)
    sync = pe.GradSync(model, accumulate=1)
    get_gradient_edge(model.weight).node.metadata["mark"] = True
    monkeypatch.setattr(parameters, "current_stream", lambda device: then)
    with sync.accumulate():
        kept = "mark" in get_gradient_edge(model.weight).node.metadata
        sync.backward(model(torch.ones(1, 2)).sum())
    return kept


def test_gradients_are_accumulated_on_the_stream_that_a_window_is_opened_on(monkeypatch):
    assert _made_under("first", "first", monkeypatch)
    assert not _made_under("first", "second", monkeypatch)


def test_parameters_keep_their_owner_on_another_stream(monkeypatch):
    monkeypatch.setattr(parameters, "current_stream", lambda device: "first")
    model = nn.Linear(2, 2)
    sync = pe.GradSync(model, accumulate=1)
    monkeypatch.setattr(parameters, "current_stream", lambda device: "second")
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    sync.unscale_()
    with pytest.raises(ValueError, match="belongs to an engine that is still there"):
        pe.GradSync(model, accumulate=1)
    sync.close()
    pe.GradSync(model, accumulate=1)


def test_another_stream_does_no_harm_while_a_parameter_is_frozen(monkeypatch):
    monkeypatch.setattr(parameters, "current_stream", lambda device: "first")
    model = nn.Linear(2, 2)
    sync = pe.GradSync(model, accumulate=1)
    monkeypatch.setattr(parameters, "current_stream", lambda device: "second")
    model.bias.requires_grad_(False)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    sync.unscale_()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
