"""The gradient noise scale: a measure of the benefit of larger batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from numbers import Real
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from pyengine.ops.device import HOST
from pyengine.ops.plan import BucketPlan, add_up
from pyengine.window.metric import Metric, MetricContext
from pyengine.window.observer import ReducedWindow

_SUMS = 8  # a state has the sums of weights, squared weights, windows, x, y, x², xy and y²


@dataclass(frozen=True)
class NoiseEstimate:
    """The noise scale after a window. A sample is one of the items that `count` counts.

    Attributes:
        noise, signal: this window's unbiased estimates of tr(S) and ‖G‖²; either may be negative.
        scale: B_noise = tr(S) / ‖G‖² in samples, from averages over windows. None if the average of ‖G‖² is
            not above 0, so that the gradient cannot be distinguished from 0 yet.
        spread: standard error of `scale`, estimated over windows; None in the first window.
        windows: number of windows in the averages.
    """

    noise: float
    signal: float
    scale: float | None
    spread: float | None
    windows: int


class NoiseScale(Metric):
    """Measure the gradient noise scale of McCandlish et al. 2018, appendix A.1: `StepRecord.noise_scale`.

    Let G be the true gradient and S the covariance of the gradient of one sample. The mean gradient g_r over
    B_r samples has E‖g_r‖² = ‖G‖² + tr(S) / B_r. A window has n such parts (the ranks, or the micro-batches
    of a single rank). The mean g over all B = Σ B_r samples has E‖g‖² = ‖G‖² + tr(S) / B. With P = Σ B_r
    ‖g_r‖² and T = B ‖g‖²:

        E P = B ‖G‖² + n tr(S)        E T = B ‖G‖² + tr(S)
        tr(S) = (P - T) / (n - 1)     ‖G‖² = (n T - P) / ((n - 1) B)

    Both estimates are also unbiased for unequal counts (P - T = Σ B_r ‖g_r - g‖² is the variance between
    parts, with the optimal weights for normal noise). For equal counts they are the estimates of the paper. A
    part with a count of 0 is left out. `scale` is the ratio of the exponential averages of both estimates
    over windows, not an average of ratios. `spread` is the standard error of a ratio of means, sqrt(E(x - R
    y)² / (m - 1)) / y, where m = (Σ w)² / Σ w² is the effective number of windows.

    Samples have to be independent and identically distributed on every rank. SGD steps are most efficient
    with a batch size near B_noise: see `python -m pyengine plan --from steps.jsonl`.

    A window is not measured (None in its record) if its step is skipped, if fewer than two parts have a
    nonzero count, or if gradients of an earlier window were kept. With one rank, a window is also not
    measured if a micro-batch has several backwards or ran before a state was loaded. Rounding in the
    communication adds an error to T, so the noise is underestimated with an 8-bit wire.

    Args:
        decay: decay of the averages per window, in [0, 1); 0.99 averages over about 200 windows.

    Raises (from `sync.measure`):
        ValueError: the engine uses exact sums, FSDP2 or an XLA device, or ranks hold different elements or
            share batches.

    Cost: one read of this rank's sums when they are cast or sent, and one all-reduce of 16 bytes. With one
    rank, the cost is instead one hook per parameter, and one read of each micro-batch's gradients in the
    backward.

    Example:
        >>> sync.measure(pe.NoiseScale())  # doctest: +SKIP
        >>> sync.last_record.noise_scale.scale  # doctest: +SKIP
        1432.7
    """

    field = "noise_scale"

    def __init__(self, *, decay: float = 0.99) -> None:
        self._decay = decay
        self._sums = [0.0] * _SUMS
        self._handles: list[Any] = []
        self._plans: dict[tuple[int, ...], _Slots] = {}

    def __repr__(self) -> str:
        return f"NoiseScale(decay={self._decay!r})"

    def problems(self, measured: MetricContext) -> list[str]:
        decay = self._decay
        if not isinstance(decay, Real) or isinstance(decay, bool) or not 0 <= decay < 1:
            return [f"NoiseScale(decay={decay!r}): expected a number in [0, 1), for example 0.99"]
        if measured.holds_parts:
            why = "no rank has a gradient of its own samples alone; only data parallelism is supported"
            return [f"NoiseScale over ranks that hold different elements or share batches: {why}"]
        if measured.owner.observers is None:
            what = "float sums of this rank alone that could be read before they are reduced over ranks"
            return [f"NoiseScale: {type(measured.owner).__name__} has no {what}; leave the metric out"]
        return []

    def bind(self, measured: MetricContext) -> None:
        super().bind(measured)
        final, self._comm = measured.final, measured.comm
        self._device = final.sumsq.device
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        # The sum of squares of this rank's gradient sum, per parameter.
        self._squares = torch.zeros_like(final.sumsq)
        # With one rank: the sums of squares of each micro-batch.
        self._rows: list[Tensor] = []
        # With one rank: the parameters that have already received a gradient in the current micro-batch.
        self._seen: set[int] = set()
        self._is_whole = True
        if self._comm.world_size == 1:
            self._handles = _hooks(measured.owner.params, self._read_gradient)
        else:
            measured.owner.observers.append(self._read_bucket)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, window: int) -> None:
        del window
        self._rows, self._is_whole = [], True
        self._squares.zero_()

    def begin_micro_batch(self) -> None:
        if self._comm.world_size == 1:
            self._rows.append(torch.zeros_like(self._squares))
            self._seen = set()

    def _read_bucket(self, indices: Sequence[int], grads: Sequence[Tensor], scale: Tensor | None) -> None:
        slots = self._plans.get(key := tuple(indices))
        if slots is None:
            slots = self._plans[key] = _Slots(indices, grads, self._device)
        slots.plan.unscale_norm(grads, None, self._one, sumsq=slots.sumsq, nonfinite=slots.nonfinite)
        squares = slots.sumsq if scale is None else slots.sumsq / scale.double().square()
        self._squares.index_copy_(0, slots.indices, squares)

    def _read_gradient(self, index: int, grad: Tensor) -> None:
        if index in self._seen or not self._rows:
            # The squares of gradients from several backwards cannot be added.
            self._is_whole = False
            return
        self._seen.add(index)
        grad = grad.to_dense() if grad.is_sparse else grad
        self._rows[-1][index] = torch.linalg.vector_norm(grad.detach(), dtype=torch.float64).square()

    def wait(self, window: ReducedWindow) -> None:
        """Sum the parts with one all-reduce of 16 bytes; the host waits only if the device is the CPU."""
        counts = window.local.counts_on(self._device)
        if self._comm.world_size == 1:
            is_whole = window.is_whole and self._is_whole and len(self._rows) == len(counts)
            squares = (
                torch.stack([add_up(row) for row in self._rows]) if is_whole else torch.zeros_like(counts)
            )
        else:
            is_whole, squares = window.is_whole, add_up(self._squares).view(1)
            counts = counts.sum().view(1)
        parts = torch.stack(
            [torch.where(counts > 0, squares / counts, 0.0).sum(), (counts > 0).double().sum()]
        )
        if self._comm.world_size > 1:
            self._comm.all_reduce(parts).wait()
        header, final = window.header, self._measured.final
        if header.inv_scale is not None:
            parts[0] *= header.inv_scale.square()
        count = header.vector()[0]
        total = final.norm_before_clipping().square() * count
        flag = (final.found_inf == 0).double() * is_whole
        self._numbers = torch.stack([parts[0], parts[1], total, count, flag])

    def numbers(self) -> Tensor:
        return self._numbers

    def record(self, numbers: Sequence[float], *, skipped: bool) -> NoiseEstimate | None:
        parts, num, total, count, is_whole = numbers
        if skipped or not is_whole or num < 2:
            return None
        noise, signal = estimate(parts, total, num=num, count=count)
        decay = self._decay
        weight, squared, windows, *means = self._sums
        values = noise, signal, noise * noise, noise * signal, signal * signal
        means = [decay * mean + value for mean, value in zip(means, values, strict=True)]
        self._sums = [decay * weight + 1, decay**2 * squared + 1, windows + 1, *means]
        scale, spread = ratio(self._sums)
        return NoiseEstimate(noise, signal, scale, spread, int(windows) + 1)

    def state(self) -> Tensor:
        return torch.tensor(self._sums, dtype=torch.float64, device=HOST)

    def load_problems(self, state: Tensor) -> list[str]:
        if state.dtype != torch.float64 or state.shape != (_SUMS,) or not bool(state.isfinite().all()):
            return [f"measured['noise_scale'] of shape {list(state.shape)}; expected {_SUMS} finite float64s"]
        weight, squared, windows, *_ = state.tolist()
        if not (0 <= squared <= weight <= windows < 2**53 and (weight > 0) == (squared > 0) == (windows > 0)):
            return ["measured['noise_scale'] with weights that no number of windows can have"]
        return []

    def load(self, state: Tensor | None) -> None:
        self._sums = [0.0] * _SUMS if state is None else state.tolist()


def _hooks(params: Sequence[Tensor], read: Callable[[int, Tensor], None]) -> list[Any]:
    """Register hooks that call `read(index, gradient)` when a backward reaches a parameter.

    Returns the handles of the hooks. `read` must be a method.
    """
    # Use a weak reference, because Python's garbage collector does not see the hooks of a parameter.
    call = WeakMethod(read)

    def look(index: int, grad: Tensor) -> None:
        own = call()
        if own is not None:
            own(index, grad)

    trained = [(index, param) for index, param in enumerate(params) if param.requires_grad]
    return [param.register_hook(partial(look, index)) for index, param in trained]


class _Slots:
    """The slots of one bucket, and buffers for their sums of squares."""

    def __init__(self, indices: Sequence[int], grads: Sequence[Tensor], device: torch.device) -> None:
        numels = [grad.numel() for grad in grads]
        self.plan = BucketPlan([*accumulate(numels, initial=0)][:-1], numels)
        self.indices = torch.tensor(indices, dtype=torch.int64, device=device)
        self.sumsq = torch.zeros(len(numels), dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(len(numels), dtype=torch.uint8, device=device)


def estimate(parts: float, total: float, *, num: float, count: float) -> tuple[float, float]:
    """Return unbiased estimates of tr(S) and ‖G‖² from one window.

    Args:
        parts: P, the sum over `num` parts of B_r ‖g_r‖².
        total: T = B ‖g‖².
        count: B.
    """
    noise = (parts - total) / (num - 1)
    return noise, (total - noise) / count


def ratio(sums: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the ratio x / y of weighted means, and its standard error; `sums` are the sums of a state."""
    weight, squared, _, *totals = sums
    x, y, xx, xy, yy = (total / weight for total in totals)
    if y <= 0:
        return None, None
    scale, worth = x / y, weight**2 / squared
    if worth <= 1 + 1e-9:
        return scale, None
    variance = max(0.0, xx - 2 * scale * xy + scale**2 * yy)
    return scale, math.sqrt(variance / (worth - 1)) / y
