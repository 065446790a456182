"""The inputs that the fuzzers have kept; each reached code that no other input reached."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import op_boundary
import state_boundary

TARGETS = {"op_boundary": op_boundary.run, "state_boundary": state_boundary.run}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus_is_survived(target):
    inputs = sorted((HERE / "corpus" / target).iterdir())
    assert inputs
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.name}: {error}") from error
