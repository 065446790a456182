"""Metrics that an engine computes in every window on request: `sync.measure(...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.window.final_pass import FinalPass
from pyengine.window.observer import WindowObserver


@dataclass(frozen=True)
class MetricContext:
    """The gradients from which metrics are computed."""

    names: Sequence[str]  # Parameter names of all ranks.
    is_trained: Sequence[bool]  # By name, whether the parameter requires a gradient.
    final: FinalPass
    comm: Comm
    owner: Any  # The `Reducer`.
    # Whether ranks hold different elements or share batches.
    holds_parts: bool


class Metric(WindowObserver):
    """Base class of metrics that are computed in every window for its `StepRecord`; see `Sync.measure`.

    A metric object belongs to one engine.
    """

    field = ""  # Name of the field in `StepRecord`.
    is_bound = False  # Whether the metric has ever been bound to an engine.

    def problems(self, measured: MetricContext) -> list[str]:
        """Return reasons why the metric is not available; ranks with equal arguments get equal reasons."""
        return []

    def bind(self, measured: MetricContext) -> None:
        """Bind the metric to an engine, which computes it from the next window on."""
        self._measured, self.is_bound = measured, True

    # ---- after the reduction ----

    def numbers(self) -> Tensor:
        """Return the numbers that the host must read in each step (float64 `[n]`)."""
        raise NotImplementedError

    def record(self, numbers: Sequence[float], *, skipped: bool) -> Any:
        """Return the value for the record; called once per step, in order, when the host knows `numbers`."""
        raise NotImplementedError

    # ---- saved state ----

    def state(self) -> Tensor | None:
        """Return a copy of the state from earlier windows, which is equal on every rank, or None."""
        return None

    def load_problems(self, state: Tensor) -> list[str]:
        """Return reasons why a saved state cannot be loaded."""
        return [f"measured[{self.field!r}], but {self!r} keeps no state"]

    def load(self, state: Tensor | None) -> None:
        """Continue from a valid state, or start without earlier windows if `state` is None."""


class GradNorms(Metric):
    """Measure the norm of each parameter's gradient: `StepRecord.grad_norms`, a dict by name.

    Each value is the 2-norm of the mean gradient before clipping and without the loss scale, over all ranks
    that hold elements of a parameter of this name. The values have the same bits on every rank. Frozen
    parameters are left out.

    Cost: a copy of 8 bytes per parameter to the host in every step. If ranks hold different elements, the
    all-reduce of the norm has 8 more bytes per parameter. The sums of squares are computed even without this
    metric.

    Example:
        >>> sync.measure(pe.GradNorms())  # doctest: +SKIP
        >>> sync.on_step(pe.telemetry.JsonLines("steps.jsonl"))  # doctest: +SKIP
    """

    field = "grad_norms"

    def __repr__(self) -> str:
        return "GradNorms()"

    def numbers(self) -> Tensor:
        return self._measured.final.norms_before_clipping()

    def record(self, numbers: Sequence[float], *, skipped: bool) -> dict[str, float]:
        del skipped
        return trained(self._measured, numbers)


def trained(measured: MetricContext, numbers: Sequence[Any]) -> dict[str, Any]:
    """Return a dict from parameter name to number, without frozen parameters."""
    named = zip(measured.names, numbers, measured.is_trained, strict=True)
    return {name: number for name, number, is_trained in named if is_trained}
