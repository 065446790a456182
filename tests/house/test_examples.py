"""The examples in docstrings run as written."""

from __future__ import annotations

import doctest

import pytest
import torch

import pyengine as pe
from pyengine import telemetry
from pyengine.data import batch_plan, rng
from pyengine.ops import exact, functional, plan


@pytest.mark.parametrize(
    "module", [batch_plan, rng, plan, exact, functional, telemetry], ids=lambda module: module.__name__
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"pe": pe, "torch": torch}, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
