"""The examples in docstrings run as they stand."""

from __future__ import annotations

import doctest

import pytest
import torch

import pyengine as pe
from pyengine import _exact, _ops, batch, seed
from pyengine.telemetry import base


@pytest.mark.parametrize("module", [batch, seed, _ops, _exact, base], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"pe": pe, "torch": torch}, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
