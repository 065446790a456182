"""The gradient noise scale's estimators, against draws of known covariance."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.window.noise_scale import estimate, ratio

COUNTS = np.array([1.0, 5.0, 2.0])
NOISE, SIGNAL = 12.0, 2.25  # tr(S) of 4 elements, |G|²


def _draws(windows: int, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P and T of each window (see `estimate`), for means over samples with isotropic noise."""
    generator = np.random.default_rng(3)
    true = np.array([1.5, 0.0, 0.0, 0.0])
    noise = generator.normal(size=(windows, len(counts), 4)) * np.sqrt(NOISE / 4 / counts)[:, None]
    means = true + noise
    mean = (means * counts[:, None]).sum(1) / counts.sum()
    return (counts * (means**2).sum(2)).sum(1), counts.sum() * (mean**2).sum(1)


@pytest.mark.parametrize("counts", [COUNTS, np.full(4, 3.0)], ids=["unequal", "equal"])
def test_both_estimates_are_unbiased(counts):
    windows = 40_000
    found = [
        estimate(parts, total, num=len(counts), count=counts.sum())
        for parts, total in zip(*_draws(windows, counts), strict=True)
    ]
    noise, signal = np.array(found).T
    # Five standard errors of the mean of independent windows.
    assert abs(noise.mean() - NOISE) < 5 * noise.std() / windows**0.5
    assert abs(signal.mean() - SIGNAL) < 5 * signal.std() / windows**0.5


def test_equal_counts_give_the_papers_estimators():
    parts, total = (each[0] for each in _draws(1, np.full(4, 3.0)))
    small, big = 3.0, 12.0
    small_norm, big_norm = parts / big, total / big  # means of |g_r|² and of |g|²
    signal = (big * big_norm - small * small_norm) / (big - small)
    noise = (small_norm - big_norm) / (1 / small - 1 / big)
    assert estimate(parts, total, num=4, count=big) == pytest.approx((noise, signal))


def _sums(x: list[float], y: list[float]) -> list[float]:
    pairs = [*zip(x, y, strict=True)]
    products = [sum(a * b for a, b in each) for each in ([(a, a) for a in x], pairs, [(b, b) for b in y])]
    return [len(x), len(x), len(x), sum(x), sum(y), *products]


def test_the_spread_is_the_standard_error_of_a_ratio_of_means():
    parts, total = _draws(400 * 500, COUNTS)
    pairs = [estimate(p, t, num=3, count=8.0) for p, t in zip(parts, total, strict=True)]
    found = [
        ratio(_sums(*map(list, zip(*pairs[k : k + 500], strict=True)))) for k in range(0, len(pairs), 500)
    ]
    scales = np.array([scale for scale, _ in found])
    # A variance over 400 draws has a relative standard error of 7 %.
    assert np.mean([spread for _, spread in found]) == pytest.approx(scales.std(), rel=0.25)
    assert np.median(scales) == pytest.approx(NOISE / SIGNAL, rel=0.05)


def test_a_ratio_without_a_gradient_or_a_second_window_has_no_spread():
    assert ratio(_sums([1.0], [2.0])) == (0.5, None)
    assert ratio(_sums([1.0, 2.0], [1.0, -2.0])) == (None, None)
