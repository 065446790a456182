"""What an engine measures in every window on request: `sync.measure(...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header, LocalWindow


@dataclass(frozen=True)
class MetricContext:
    """The gradients that are measured."""

    names: Sequence[str]  # of the parameters of all ranks
    is_trained: Sequence[bool]  # by name, whether it requires a gradient
    final: FinalPass
    comm: Comm
    owner: Any  # the `Reducer`
    # Whether ranks hold different elements, or share batches.
    holds_parts: bool


@dataclass(frozen=True)
class ReducedWindow:
    """A window that has been reduced, before ranks know whether it is used."""

    header: Header
    local: LocalWindow
    is_whole: bool  # whether its gradients are of its own micro-batches only


class Metric:
    """Something that is measured in every window, and reported in its `StepRecord`; see `Sync.measure`.

    An object belongs to one engine. Every rank calls its methods at the same points.
    """

    field = ""  # of the StepRecord
    is_bound = False  # whether an engine has it, or had it

    def problems(self, measured: MetricContext) -> list[str]:
        """Return why this cannot be measured; the same on every rank that has the same arguments."""
        return []

    def bind(self, measured: MetricContext) -> None:
        """Start to measure, from the next window on."""
        self._measured, self.is_bound = measured, True

    def release(self) -> None:
        """Remove hooks; the engine is closed."""

    # ---- a window, in the order of calls ----

    def begin(self) -> None:
        """Start a window, before its first backward."""

    def begin_micro_batch(self) -> None:
        """Start a micro-batch, before its first backward."""

    def wait(self, window: ReducedWindow) -> Tensor | None:
        """Measure the reduced gradients, before the user clips; not where ranks disagree in the header.

        May launch collectives. `FinalPass.found_inf` is 1 if the window cannot be used. Returns None, or the
        norm to which the gradients are to be clipped, float64 0-dim.
        """
        del window
        return None

    def reason(self) -> str:
        """Describe what this has done to the window, where `FinalPass.acted` is 1; the host waits."""
        return ""

    def numbers(self) -> Tensor:
        """Return what the host has to read of a window that is being stepped, float64 `[n]`."""
        raise NotImplementedError

    def record(self, numbers: Sequence[float], *, skipped: bool) -> Any:
        """Return the field's value; called once a step, in their order, when the host has the numbers."""
        raise NotImplementedError

    # ---- states ----

    def state(self) -> Tensor | None:
        """Return what is kept of earlier windows, the same on every rank, a copy; None for nothing."""
        return None

    def load_problems(self, state: Tensor) -> list[str]:
        """Return why a state does not fit."""
        return [f"measured[{self.field!r}], which {self!r} does not keep"]

    def load(self, state: Tensor | None) -> None:
        """Continue from a state that fits; None: start without earlier windows."""


class GradNorms(Metric):
    """Measure the norm of each parameter's gradient: `StepRecord.grad_norms`, a dict by name.

    Each is the 2-norm of the mean gradient before clipping, loss scale removed, over all ranks that hold
    elements of a parameter of that name; the same bits on every rank. Frozen parameters are left out.

    Cost: the sums of squares exist. 8 bytes a parameter are copied to the host in every step; where ranks
    hold different elements the all-reduce of the norm carries as many more.

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
    """Return numbers, one a name, as a dict without frozen parameters."""
    named = zip(measured.names, numbers, measured.is_trained, strict=True)
    return {name: number for name, number, is_trained in named if is_trained}
