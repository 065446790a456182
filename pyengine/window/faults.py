"""The errors (faults) of one window on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class FaultKind(Enum):
    """Kinds of faults, which differ in how other ranks learn of a fault and in how the fault is handled."""

    # This rank has found an error and refuses the window. The header reports the error, and every rank
    # raises it.
    REFUSED = "refused"
    # An exception ended the last backward after the header was launched. The missing reductions were filled
    # with nan, so every rank skips the step.
    GAVE_UP = "gave up"
    # An exception ended the reduction on this rank. Other ranks may have stepped their optimizer.
    NOT_REDUCED = "not reduced"
    # The fault was found after the header, on this rank only. This rank does not step its optimizer, but
    # other ranks may have done so.
    UNUSABLE = "unusable"
    # All ranks have agreed that the window must not be used, and raise the same error.
    CONCLUDED = "concluded"


@dataclass(frozen=True)
class Fault:
    """One error in a window.

    Attributes:
        flag: a 0-dim bool tensor, not read yet; the fault applies only if the flag is True. None if the fault
            always applies.
        error: for a fault on which ranks have agreed, the exception that every rank raises.
    """

    kind: FaultKind
    text: str
    flag: Tensor | None = None
    error: Exception | None = None


class Faults(list[Fault]):
    """The faults of one window, in the order in which they were found."""

    def refuse(self, text: str, flag: Tensor | None = None) -> None:
        """Make all ranks raise an error; with `flag`, an unread 0-dim bool tensor, only if `flag` is True."""
        self.append(Fault(FaultKind.REFUSED, text, flag))

    def note(self, kind: FaultKind, text: str, error: Exception | None = None) -> None:
        self.append(Fault(kind, text, error=error))

    def first(self, kind: FaultKind) -> str:
        """Return the text of the first fault of a kind, or an empty string."""
        return next((fault.text for fault in self if fault.kind is kind), "")

    def refusals(self) -> list[str]:
        """Return the errors of this rank in the window, except errors that depend on a flag."""
        return [fault.text for fault in self if fault.kind is FaultKind.REFUSED and fault.flag is None]

    def flags(self) -> list[Tensor]:
        """Return the flags of all errors that depend on a flag."""
        return [fault.flag for fault in self if fault.flag is not None]

    def all_refusals(self) -> list[str]:
        """Return all errors of this rank in the window; only for error messages, because it reads flags."""
        return [
            fault.text
            for fault in self
            if fault.kind is FaultKind.REFUSED and (fault.flag is None or bool(fault.flag))
        ]
