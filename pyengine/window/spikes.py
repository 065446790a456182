"""A metric that skips or clips windows whose gradient norm is far above the norms of earlier windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from pyengine.ops.device import is_lazy
from pyengine.window.metric import Metric, MetricContext, trained
from pyengine.window.nonfinite import listed
from pyengine.window.observer import ReducedWindow

SpikeAction = Literal["skip", "clip"]


@dataclass(frozen=True)
class Spike:
    """A window whose gradient norm was above the limit.

    Attributes:
        norm, median: norm of the mean gradient before clipping, and the running median.
        params: maps the name of each parameter that caused the spike to the ratio of the parameter's norm to
            its running median. Contains the ratios above `factor`; if there are none, only the parameter with
            the largest norm.
    """

    norm: float
    median: float
    params: dict[str, float]


class SpikePolicy(Metric):
    """Skip or clip windows whose gradient norm is above `factor` times a running median.

    The decision is made on the device from the norm, whose bits are equal on every rank, so all ranks make
    the same decision and no host waits. `StepRecord.spike` contains the norm, the median, and the parameters
    that caused the spike; `StepRecord.reason` describes them.

    No window is a spike while the median is 0, for example before a model starts to train.

    The median is taken over the last `window` windows with a finite norm. Skipped and clipped windows are
    included, so that the median adapts when norms have grown permanently. If there are two middle values, the
    lower value is used. The first `window` windows are never skipped or clipped. The history of norms is part
    of `sync.state_dict()`.

    Args:
        factor: ratio of the norm to the median above which a window is a spike; above 1.
        window: number of windows in the running median, at least 1.
        action: "skip" leaves the parameters unchanged, as a window with inf or nan does, but does not change
            the loss scale. It cannot stop an optimizer that you step yourself after `sync.unscale_()`. "clip"
            scales the gradients so that their norm is `factor` times the median; your own clipping comes
            afterwards.

    Raises (from `sync.measure`):
        ValueError: an argument is invalid, or the device is an XLA device.

    Cost: memory for `window` norms of 8 bytes per parameter. These norms are sorted in every window. "clip"
    reads and writes every gradient once more: on an accelerator in every window, on the CPU only in windows
    with a spike.

    Example:
        >>> sync.measure(pe.SpikePolicy(factor=4, window=100))  # doctest: +SKIP
    """

    field = "spike"

    def __init__(self, *, factor: float, window: int = 100, action: SpikeAction = "skip") -> None:
        self._factor, self._window, self._action = factor, window, action

    def __repr__(self) -> str:
        return f"SpikePolicy(factor={self._factor!r}, window={self._window!r}, action={self._action!r})"

    def problems(self, measured: MetricContext) -> list[str]:
        found, factor, window = [], self._factor, self._window
        if not isinstance(factor, Real) or isinstance(factor, bool) or not factor > 1:
            found.append(f"SpikePolicy(factor={factor!r}): expected a number above 1, for example 4")
        if type(window) is not int or window < 1:
            found.append(f"SpikePolicy(window={window!r}): expected a whole number of windows, at least 1")
        if self._action not in get_args(SpikeAction):
            found.append(f'SpikePolicy(action={self._action!r}): expected "skip" or "clip"')
        if is_lazy(measured.final.sumsq.device):
            found.append("SpikePolicy does not support XLA devices: leave the metric out")
        return found

    def bind(self, measured: MetricContext) -> None:
        super().bind(measured)
        # The total norm and the norms by name of the last windows, with one row per window.
        shape, device = (self._window, 1 + len(measured.names)), measured.final.sumsq.device
        self._history = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
        # The number of windows recorded so far.
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        self._rows = torch.arange(self._window, dtype=torch.int64, device=device)

    def wait(self, window: ReducedWindow) -> Tensor | None:
        del window
        final = self._measured.final
        row = torch.cat([final.grad_norm().view(1), final.norms_before_clipping()])
        medians = self._history.sort(dim=0).values[(self._window - 1) // 2]
        is_known = (self._seen >= self._window) & (medians[0] > 0)
        limit = torch.where(is_known, self._factor * medians[0], torch.inf)
        is_used = row[0].isfinite() & (final.found_inf == 0)
        is_spike = is_used & (row[0] > limit)
        is_due = (self._rows == self._seen % self._window) & is_used
        self._history = torch.where(is_due.unsqueeze(1), row, self._history)
        self._seen = self._seen + is_used
        self._numbers = torch.cat([is_spike.double().view(1), row, medians])
        final.acted = is_spike.double()
        if self._action == "skip":
            final.forbid(is_spike)
            return None
        return torch.where(is_spike, limit, torch.inf)

    def numbers(self) -> Tensor:
        return self._numbers

    def record(self, numbers: Sequence[float], *, skipped: bool) -> Spike | None:
        del skipped
        return self._spike(numbers) if numbers[0] else None

    def reason(self) -> str:
        """Describe the spike of the window; waits for the device."""
        spike = self._spike(self._numbers.tolist())
        named = [f"{name!r} ({times:.3g} times its median)" for name, times in spike.params.items()]
        did = "skipped" if self._action == "skip" else "clipped"
        return (
            f"{did} by {self!r}: the gradient norm is {spike.norm:.4g}, {spike.norm / spike.median:.3g} "
            f"times its running median of {spike.median:.4g}, from {listed(named)}"
        )

    def _spike(self, numbers: Sequence[float]) -> Spike:
        half = len(numbers) // 2
        norms, medians = numbers[1 : 1 + half], numbers[1 + half :]
        pairs = [*zip(norms[1:], medians[1:], strict=True)]
        times = trained(self._measured, [norm / median if median else torch.inf for norm, median in pairs])
        of_names = trained(self._measured, norms[1:])
        largest = sorted(times, key=lambda name: -of_names[name])
        above = [name for name in largest if of_names[name] > 0 and times[name] > self._factor]
        return Spike(norms[0], medians[0], {name: times[name] for name in above or largest[:1]})

    # ---- saved state ----

    def state(self) -> Tensor:
        return torch.cat([self._seen.double().view(1), self._history.flatten()])

    def load_problems(self, state: Tensor) -> list[str]:
        numbers = 1 + self._history.numel()
        if state.dtype != torch.float64 or state.shape != (numbers,):
            kept = f"{self!r} over these parameters keeps {numbers}: pass the same window as in the state"
            return [f"measured['spike'] of {list(state.shape)} numbers, but {kept}"]
        seen, norms = float(state[0]), state[1:]
        if not (0 <= seen < 2**53 and seen.is_integer() and bool((norms >= 0).all())):
            return ["measured['spike'] that is not a number of windows with their norms"]
        return []

    def load(self, state: Tensor | None) -> None:
        self.bind(self._measured)
        if state is not None:
            state = state.to(self._history.device, copy=True)
            self._seen, self._history = state[0].long(), state[1:].view_as(self._history)
