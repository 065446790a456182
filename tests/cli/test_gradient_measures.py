"""The commands plot gradient norms and the noise scale; without matplotlib or an estimate they omit them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

import pyengine as pe
from pyengine.cli.gradient_measures import draw, layer_norms, measure_noise_scale, with_spread
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.train import run as train_run
from pyengine.cli.train.report import TrainReport
from pyengine.step.step_record import StepRecord
from pyengine.window.noise_scale import NoiseEstimate

UNKNOWN = NoiseEstimate(3.0, -1.0, None, None, 2)
BLANK = StepRecord(0, 2, 8.0, 1.5, 1.0, False, "", 64, 2, 0.5, 0.25, 1.0)
NORMS = [{"a.weight": 3.0, "a.bias": 4.0, "b": 2.0}, {"a.weight": 1.0, "a.bias": 0.0, "b": 5.0}]


def records(*estimates: NoiseEstimate | None) -> list[StepRecord]:
    return [
        replace(BLANK, step=step, grad_norms=norms, noise_scale=estimate)
        for step, (norms, estimate) in enumerate(zip(NORMS, estimates, strict=True))
    ]


KNOWN = records(NoiseEstimate(3.0, 1.0, 30.0, None, 1), NoiseEstimate(3.0, 1.0, 20.0, 5.0, 2))


@pytest.fixture
def figures(monkeypatch):
    """Return the list of saved figures, which are not rendered; their files are empty."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []

    def save(figure: Any, path: Path) -> None:
        Path(path).touch()
        saved.append(figure)

    monkeypatch.setattr(matplotlib.Figure, "savefig", save)
    return saved


def test_few_parameters_have_a_line_each():
    assert layer_norms(NORMS) == {"a.weight": [3.0, 1.0], "a.bias": [4.0, 0.0], "b": [2.0, 5.0]}


@pytest.mark.parametrize(
    ("blocks", "layers", "last"),
    [(3, 12, "blocks.2.v.b"), (4, 8, "blocks.3.v"), (12, 12, "blocks.11"), (13, 1, "blocks")],
)
def test_many_parameters_have_a_line_for_each_layer(blocks, layers, last):
    names = [f"blocks.{n}.{part}" for n in range(blocks) for part in ("w.a", "w.b", "v.a", "v.b")]
    found = layer_norms([dict.fromkeys(names, 2.0)])
    assert [norm for (norm,) in found.values()] == [pytest.approx(2 * (len(names) / layers) ** 0.5)] * layers
    assert list(found)[-1] == last


def test_norms_and_noise_scale_are_drawn_over_steps(figures, tmp_path):
    draw(KNOWN, tmp_path / "norms.png", unit="tokens")
    norms, noise = figures[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in norms.lines}
    assert lines == {"a.weight": [3.0, 1.0], "a.bias": [4.0, 0.0], "b": [2.0, 5.0]}
    assert noise.get_title(loc="left") == "Noise scale (tokens)"
    scales, *_, batch = noise.lines
    assert (list(scales.get_xdata()), list(scales.get_ydata())) == ([0, 1], [30.0, 20.0])
    assert list(batch.get_ydata()) == [8.0, 8.0]
    (bars,) = noise.collections
    assert [part[:, 1].tolist() for part in bars.get_segments()] == [[30.0, 30.0], [15.0, 25.0]]


@pytest.mark.parametrize("estimate", [None, UNKNOWN])
def test_without_a_noise_scale_norms_are_drawn_alone(figures, tmp_path, estimate):
    draw(records(None, estimate), tmp_path / "norms.png", unit="tokens")
    assert len(figures[0].axes) == 1


@pytest.mark.parametrize(
    ("scale", "spread", "text"),
    [
        (24.4, 9.87, "24 ± 9.9"),
        (1432.7, None, "1,433"),
        (123456.0, 5400.0, "123k ± 5,400"),
        (99.6, 9.97, "100 ± 10"),
        (0.5, 1, "0.5 ± 1"),
    ],
)
def test_a_noise_scale_is_short_text(scale, spread, text):
    assert with_spread(scale, spread) == text


@on_ranks(2)
def test_a_refused_noise_scale_is_warned_of_and_norms_are_measured():
    sync = pe.GradSync(model := nn.Linear(2, 1), accumulator="exact")
    sync.measure(pe.GradNorms())
    measure_noise_scale(sync, parts=1)
    with pytest.warns(match="no noise scale: .* has no float sums of this rank alone"):
        measure_noise_scale(sync, parts=2)
    seen: list[StepRecord] = []
    sync.on_step(seen.append)
    with sync.accumulate(last=True):
        sync.backward(model(torch.ones(1, 2)).sum(), count=1)
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert seen[0].grad_norms == {"weight": pytest.approx(2**0.5), "bias": 1.0}
    assert seen[0].noise_scale is None


# ---- what `train` reports ----


@pytest.fixture
def plot(tmp_path, monkeypatch, capsys):
    """Return a function: `plot(records)` returns rank 0's JSON line, or with `as_json=False` its text."""
    monkeypatch.setattr(train_run.dist, "get_rank", lambda: 0)

    def run(trained, *, as_json=True):
        report = TrainReport(as_json=as_json)
        report.start("cnn", "images", done=0, steps=2, about={})
        train_run.plot(DigitsTask(), trained, tmp_path / "trace.json.gz", report)
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1]) if as_json else out

    return run


def test_the_plot_stands_beside_the_trace(plot, figures, tmp_path):
    path = str(tmp_path / "trace-norms.png")
    assert plot(KNOWN) == {"event": "norms", "model": "cnn", "plot": path, "noise_scale": 20.0, "spread": 5.0}
    out = plot(KNOWN, as_json=False)
    assert f"noise scale: 20 ± 5 images; batch: 8 images\ngradient norms: {path}\n" in out


def test_without_matplotlib_there_is_no_plot(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = plot(KNOWN)
    assert (found["plot"], found["noise_scale"]) == (None, 20.0)
    assert "gradient norms: not drawn, since matplotlib" in plot(KNOWN, as_json=False)


def test_without_measured_steps_there_is_no_plot(plot):
    assert plot([BLANK])["event"] == "start"
