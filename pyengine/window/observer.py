"""The interface of the objects that observe an engine's windows: metrics and the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.window.header import Header, LocalWindow


@dataclass(frozen=True)
class ReducedWindow:
    """A window whose gradients have been reduced, before ranks know whether it will be used."""

    header: Header
    local: LocalWindow
    is_whole: bool  # whether all gradients come from the window's own micro-batches


class WindowObserver:
    """Base class of the objects that observe an engine's windows.

    The methods are listed in the order in which the engine calls them in a window. Every rank calls them at
    the same points. The default implementations do nothing.
    """

    def has_work_in(self, window: int) -> bool:
        """Whether the observer needs the host in a window, so that the window cannot run as a CUDA graph."""
        del window
        return True

    def begin(self, window: int) -> None:
        """Start a window, before its first backward."""

    def begin_micro_batch(self) -> None:
        """Start a micro-batch, before its first backward."""

    def keep(self) -> Callable[[], object] | None:
        """Return a function that discards the samples of a backward that will run again, or None."""
        return None

    def sample(self, loss_scale: Callable[[], Tensor | None]) -> None:
        """Read the reduced gradients before any other code changes them.

        `loss_scale` returns the loss scale of the gradients as a 0-dim tensor, or None for a scale of 1.
        """

    def wait(self, window: ReducedWindow) -> Tensor | None:
        """Measure the reduced gradients; not called if ranks disagree in the header.

        An observer that was called earlier may already have clipped the gradients; the user clips later.

        This method may launch collectives. `FinalPass.found_inf` is 1 if the window cannot be used. Returns
        None, or the norm to which the gradients should be clipped, as a 0-dim float64 tensor.
        """
        del window
        return None

    def check(self, window: ReducedWindow) -> None:
        """Compare ranks after all metrics are computed; raise AuditError on every rank if they differ.

        After this check only the collectives about failed windows (`Verdict.reach`) follow; see [Note: order
        of collectives in a window] in engine/engine.py.
        """

    def reason(self) -> str:
        """Describe how the observer changed the window if `FinalPass.acted` is 1; waits for the device."""
        return ""

    def step(self, optimizer: Any) -> None:
        """Read an optimizer before it steps."""

    def release(self) -> None:
        """Remove all hooks when the engine is closed."""
