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
    """Refuse an instruction set other than the requested one, and restore the handler of SIGINT.

    A shell starts background jobs with SIGINT ignored. Child processes inherit that, and commands respect it.
    """
    if _PROBLEM is not None:
        raise pytest.UsageError(_PROBLEM)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark combinations of arguments that test nothing new; only `make faults` runs them."""
    leave_out(items)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of one library in one worker under `--dist loadfile`."""
    return sharing.by_file_and_library(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def _pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture
def ranks(_pool: RankPool) -> Callable[[int], Ranks]:
    """Return a function: `ranks(world).run(fn, ...)` runs a module-level `fn` on real gloo ranks."""
    return lambda world: Ranks(_pool, world)
