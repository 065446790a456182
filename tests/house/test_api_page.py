"""docs/api.md has every public name; `make docs` finds those that are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pyengine as pe

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function):: ([\w.]+)$", re.MULTILINE)
DESCRIBED = {name.removeprefix("pyengine.") for name in DIRECTIVE.findall(PAGE)}


@pytest.mark.parametrize("name", sorted(set(pe.__all__) - {"ops", "wire", "telemetry"}))
def test_a_public_name_is_described(name):
    assert name in DESCRIBED
    assert f"\n   {name}\n" in PAGE.partition("The engine")[0]


@pytest.mark.parametrize("name", pe.telemetry.__all__)
def test_a_public_name_of_telemetry_is_described(name):
    assert f"telemetry.{name}" in DESCRIBED


@pytest.mark.parametrize("name", pe.wire.__all__)
def test_a_public_name_of_the_wires_is_described(name):
    assert f"wire.{name}" in DESCRIBED


@pytest.mark.parametrize("name", pe.ops.__all__)
def test_a_public_name_of_the_ops_is_described(name):
    assert f"ops.{name}" in DESCRIBED
