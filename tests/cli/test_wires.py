"""The names of wires: one table for every command."""

from __future__ import annotations

import pytest

import pyengine as pe
from pyengine.cli.bench.variants import VARIANTS, Attach, Engine
from pyengine.cli.main import build_parser
from pyengine.cli.train.arguments import settings
from pyengine.wire.named import WIRES


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("fp32", pe.wire.FP32()),
        ("bf16", pe.wire.BF16()),
        ("fp16", pe.wire.FP16()),
        ("bf16-sum-fp32", pe.wire.BF16(sum="fp32")),
        ("fp16-sum-fp32", pe.wire.FP16(sum="fp32")),
        ("int8", pe.wire.Int8()),
        ("fp8-e4m3", pe.wire.FP8()),
        ("fp8-e5m2", pe.wire.FP8("e5m2")),
        ("bf16-sum-fp32-ef", pe.wire.ErrorFeedback(pe.wire.BF16(sum="fp32"))),
        ("int8-ef", pe.wire.ErrorFeedback(pe.wire.Int8())),
        ("fp8-e5m2-ef", pe.wire.ErrorFeedback(pe.wire.FP8("e5m2"))),
    ],
)
def test_a_name_is_the_wire_that_it_says(name, wire):
    assert WIRES[name] == wire


@pytest.mark.parametrize("name", WIRES)
def test_train_takes_every_wire_and_bench_has_it_both_ways(name):
    options = build_parser().parse_args(["train", "--wire", name, "--workers", "1"])
    assert settings(options).wire == name
    ending = "" if name == "fp32" else "_" + name.replace("-", "_")
    for stem, kind in (("engine", Engine), ("attach", Attach)):
        variant = VARIANTS[stem + ending]
        assert issubclass(variant, kind) and variant.wire == WIRES[name]
