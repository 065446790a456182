"""The examples in docstrings and docs run as they stand."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch

import pyengine as pe
from pyengine import _exact, _ops, batch, seed
from pyengine.telemetry import base

DOCS = Path(__file__).parents[2] / "docs"
RULES = {"optionflags": doctest.ELLIPSIS}


@pytest.mark.parametrize("module", [batch, seed, _ops, _exact, base], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"pe": pe, "torch": torch}, **RULES)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", ["batch.md", "quickstart.md", "wires.md"])
def test_examples_in_docs_run(name):
    result = doctest.testfile(str(DOCS / name), module_relative=False, encoding="utf-8", **RULES)
    assert result.attempted > 0 and result.failed == 0
