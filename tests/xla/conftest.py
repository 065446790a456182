"""Fixtures for tests on XLA replicas; `make test-xla` creates the environment that they need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replicas import Replicas


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder if torch_xla is missing."""
    if find_spec("torch_xla") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs torch_xla: make test-xla"))


@pytest.fixture(scope="session")
def _kept() -> Iterator[dict[tuple[int, tuple[str, ...]], Replicas]]:
    kept: dict[tuple[int, tuple[str, ...]], Replicas] = {}
    yield kept
    for replicas in kept.values():
        replicas.stop()


@pytest.fixture
def replicas(_kept: dict[tuple[int, tuple[str, ...]], Replicas]) -> Callable[..., Replicas]:
    """Return a function: `replicas(world).run(fn, ...)` runs a module-level `fn(rank, ...)` on real replicas
    of XLA's CPU backend.
    """

    def get(world: int, **environment: str) -> Replicas:
        key = world, tuple(sorted(environment.items()))
        return _kept.setdefault(key, Replicas(world, environment))

    return get
