"""Fixtures for every test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "isa")]

import forced_isa
import sharing
from pairs import leave_out
from ranks import RankPool, Ranks

_PROBLEM = forced_isa.everywhere()


def pytest_configure() -> None:
    """Refuse to run on another instruction set than was asked for, and let Ctrl-C be heard.

    A shell has its background jobs ignore it, which processes inherit, and commands respect.
    """
    if _PROBLEM is not None:
        raise pytest.UsageError(_PROBLEM)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let combinations that show nothing new run in `make faults` alone."""
    leave_out(items)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of one library together, where files are shared out."""
    return sharing.by_file_and_library(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def _pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture
def ranks(_pool: RankPool) -> Callable[[int], Ranks]:
    """Give `ranks(world).run(fn, ...)`: run a module-level function on real gloo ranks."""
    return lambda world: Ranks(_pool, world)
