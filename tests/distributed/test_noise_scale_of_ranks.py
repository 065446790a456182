"""The noise scale of windows over ranks, compared with numpy's estimate from the same samples."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import assert_alike, engine, me, records_of
from ranks import on_ranks
from sharded_cases import sharded
from torch import Tensor, nn

import pyengine as pe

SIZE, SIGNAL, NOISE = 48, 4.0, 96.0  # number of elements, |G|² and tr(S)
SIZES = [[3, 1], [2, 5], [4, 4]]  # samples of each micro-batch, by rank


class Linear(nn.Module):
    """A loss whose gradient is the sum of its samples, split over two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(SIZE // 2)) for _ in range(2))

    def forward(self, samples: Tensor) -> Tensor:
        return (samples @ torch.cat([self.left, self.right])).sum()


def _samples(generator: np.random.Generator, sizes: list[int]) -> list[np.ndarray]:
    noise = generator.normal(size=(sum(sizes), SIZE)) * (NOISE / SIZE) ** 0.5
    return np.split(noise + (SIGNAL / SIZE) ** 0.5, np.cumsum(sizes)[:-1])


def _want(parts: list[np.ndarray]) -> tuple[float, float]:
    """Return tr(S) as the variance between parts, and |G|², in float64."""
    counts, means = [len(each) for each in parts], [each.mean(0) for each in parts]
    mean = np.concatenate(parts).mean(0)
    between = sum(count * ((own - mean) ** 2).sum() for count, own in zip(counts, means, strict=True))
    noise = between / (len(parts) - 1)
    return noise, (mean**2).sum() - noise / sum(counts)


def _train(sync: pe.Sync, forward: nn.Module, windows: list[list[np.ndarray]]) -> None:
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.0)
    data = [torch.from_numpy(each).float() for window in windows for each in window]
    for window in sync.windows(data):
        for samples in window:
            sync.backward(forward(samples), count=len(samples))
        sync.clip_grad_norm_(1e-3)  # the noise scale is measured before clipping
        sync.step(optimizer)


@pytest.mark.parametrize(
    ("owner", "world", "is_scaled", "options"),
    [
        ("own", 1, False, {}),
        ("own", 2, False, {}),
        ("own", 3, False, {"wire": pe.wire.FP16()}),
        ("own", 3, True, {}),
        ("attach", 1, False, {}),
        ("attach", 2, True, {}),
        ("attach", 3, False, {"wire": pe.wire.BF16()}),
    ],
)
@on_ranks()
def test_a_window_has_the_estimates_of_its_samples(owner, is_scaled, options):
    rank, world = me()
    sync, forward = engine(owner, Linear(), accumulate=2, **options)
    if is_scaled:
        sync.scaler = pe.GradScaler("cpu", init_scale=1024.0)
    sync.measure(pe.NoiseScale(decay=0.5))
    generator, records = np.random.default_rng(7), records_of(sync)
    everybody = [[_samples(generator, SIZES[r]) for r in range(world)] for _ in range(3)]
    _train(sync, forward, [window[rank] for window in everybody])
    pairs = []
    for record, window in zip(records, everybody, strict=True):
        parts = window[0] if world == 1 else [np.concatenate(mine) for mine in window]
        pairs.append(want := _want(parts))
        found = record.noise_scale
        # bf16 has 8 bits, fp16 has 11: rounding has a variance of (2^-8)² / 12 of each element's square. |G|²
        # is a difference of numbers that are up to 30 times as large.
        narrow = "wire" in options
        assert found.noise == pytest.approx(want[0], rel=1e-2 if narrow else 1e-4)
        assert found.signal == pytest.approx(want[1], rel=1e-4, abs=0.1 if narrow else 1e-3)
        assert_alike((found.noise, found.signal))
    if not options and not is_scaled:
        weights = np.array([0.25, 0.5, 1.0])
        noise, signal = (weights @ np.array(pairs)).tolist()
        last = records[-1].noise_scale
        assert last.windows == 3
        assert last.scale == (pytest.approx(noise / signal, rel=1e-3) if signal > 0 else None)


@on_ranks(2)
def test_averages_continue_from_a_state():
    rank, world = me()
    generator = np.random.default_rng(5)
    windows = [[_samples(generator, SIZES[r]) for r in range(world)][rank] for _ in range(4)]

    def run(start: int, stop: int, state: dict | None) -> tuple[pe.NoiseEstimate, dict]:
        sync = pe.GradSync(model := Linear(), accumulate=2)
        sync.measure(pe.NoiseScale())
        if state is not None:
            sync.load_state_dict(state)
        records = records_of(sync)
        _train(sync, model, windows[start:stop])
        saved = sync.state_dict()
        sync.close()
        return records[-1].noise_scale, saved

    want, _ = run(0, 4, None)
    _, state = run(0, 2, None)
    assert run(2, 4, state)[0] == want
    sync = pe.GradSync(Linear(), accumulate=2)
    with pytest.warns(UserWarning, match=r"state has \['noise_scale'\] of earlier windows"):
        sync.load_state_dict(state)


@on_ranks(1)
def test_windows_that_cannot_be_measured_have_no_estimate():
    sync = pe.GradSync(model := Linear(), accumulate=2)
    sync.measure(pe.NoiseScale())
    records = records_of(sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def window(*kinds: str) -> None:
        for number, kind in enumerate(kinds, start=1):
            with (
                sync.accumulate(last=number == len(kinds)),
                sync.micro_batch(count=0 if kind == "empty" else 1) as mb,
            ):
                for _ in range(1 + (kind == "twice")):
                    mb.backward(model(torch.randn(1, SIZE)) * (torch.inf if kind == "inf" else 1))
        sync.step(optimizer)

    window("once", "once")
    window("once", "twice")
    window("once", "empty")
    window("once")
    with pytest.warns(UserWarning, match="skipped"):
        window("once", "inf")
    window("once", "once")
    assert [record.noise_scale is not None for record in records] == [True, *[False] * 4, True]
    assert records[-1].noise_scale.windows == 2


@on_ranks(2)
def test_owners_without_own_sums_refuse_before_training():
    model, _ = sharded("flat")
    with pytest.raises(ValueError, match="NoiseScale over ranks that hold different elements"):
        model.measure(pe.NoiseScale())
    sync = pe.GradSync(Linear(), accumulator="exact")
    with pytest.raises(ValueError, match="NoiseScale: BucketReducer has no float sums of this rank alone"):
        sync.measure(pe.NoiseScale())
    with pytest.raises(ValueError, match=r"NoiseScale\(decay=1\): expected a number in \[0, 1\)"):
        pe.GradSync(Linear()).measure(pe.NoiseScale(decay=1))


def test_a_record_s_line_has_the_estimate(tmp_path):
    record = replace(pe.StepRecord(0, 2, 8.0, None, 1.5, False, "", 64, 2, 0.1, 0.0, 0.2), loss=0.5)
    record = replace(record, noise_scale=pe.NoiseEstimate(3.0, 2.0, 1.5, None, 1))
    pe.telemetry.JsonLines(tmp_path / "steps.jsonl")(record)
    line = json.loads((tmp_path / "steps.jsonl").read_text())
    assert line["noise_scale"] == {"noise": 3.0, "signal": 2.0, "scale": 1.5, "spread": None, "windows": 1}
    numbers = pe.telemetry.numbers(record)
    assert numbers["noise_scale/scale"] == 1.5 and "noise_scale/spread" not in numbers
