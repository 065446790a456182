"""At most one live engine owns a parameter's gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from pyengine.engine.parameters import Ownership, owned_problems


class Engine:
    """An object that owns gradients."""


def _named(*, frozen: int = 0, count: int = 3) -> list[tuple[str, Parameter]]:
    return [(f"p{i}", Parameter(torch.ones(1), requires_grad=i >= frozen)) for i in range(count)]


def test_an_engine_that_nobody_has_any_more_owns_nothing():
    named, engine = _named(), Engine()
    engine.itself = engine  # a cycle, which waits for a garbage collection
    _mark = Ownership([param for _, param in named], engine)
    del engine
    assert list(owned_problems(named)) == []


@pytest.mark.parametrize(
    ("count", "frozen", "text"),
    [(1, 0, "parameter 'p0' belongs"), (3, 0, "parameter 'p0' and 2 more"), (3, 2, "parameter 'p2' belongs")],
)
def test_parameters_of_an_engine_that_is_there_are_named(count, frozen, text):
    named, engine = _named(count=count, frozen=frozen), Engine()
    _mark = Ownership([param for _, param in named], engine)
    (problem,) = owned_problems(named)
    assert problem.startswith(f"call sync.close() on the old engine first, or use the old engine: {text}")
