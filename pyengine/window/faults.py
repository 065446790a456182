"""What has gone wrong with a window on this rank: one list, of one entry a fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class FaultKind(Enum):
    """How the other ranks learn of a fault, and what follows from it."""

    # This rank refuses the window. The header says so, and every rank raises.
    REFUSED = "refused"
    # An exception ended the last backward, behind the header. The reductions that were missing were filled up
    # with nan, so every rank skips the step.
    GAVE_UP = "gave up"
    # An exception ended the reduction on this rank. Other ranks may have stepped.
    NOT_REDUCED = "not reduced"
    # Found behind the header, on this rank alone: it does not step, and other ranks may have.
    UNUSABLE = "unusable"
    # The ranks have concluded together that the window is not used: all of them raise.
    CONCLUDED = "concluded"


@dataclass(frozen=True)
class Fault:
    """One fault of a window.

    Attributes:
        flag: bool, 0-dim, unread: the fault holds only where it is set. None: it holds.
        error: of a fault that the ranks have concluded, what each of them raises.
    """

    kind: FaultKind
    text: str
    flag: Tensor | None = None
    error: Exception | None = None


class Faults(list[Fault]):
    """The faults of one window, in the order in which they were found."""

    def refuse(self, text: str, flag: Tensor | None = None) -> None:
        """Refuse the window; with `flag`, bool 0-dim and unread, only where that is set."""
        self.append(Fault(FaultKind.REFUSED, text, flag))

    def note(self, kind: FaultKind, text: str, error: Exception | None = None) -> None:
        self.append(Fault(kind, text, error=error))

    def first(self, kind: FaultKind) -> str:
        """Return the text of the first fault of a kind; empty if there is none."""
        return next((fault.text for fault in self if fault.kind is kind), "")

    def refusals(self) -> list[str]:
        """Return why this rank refuses the window, as far as the host knows without reading a flag."""
        return [fault.text for fault in self if fault.kind is FaultKind.REFUSED and fault.flag is None]

    def flags(self) -> list[Tensor]:
        """Return the flags of refusals that hold only where they are set."""
        return [fault.flag for fault in self if fault.flag is not None]

    def all_refusals(self) -> list[str]:
        """Return why this rank refuses the window. Reads flags: for error reports only."""
        return [
            fault.text
            for fault in self
            if fault.kind is FaultKind.REFUSED and (fault.flag is None or bool(fault.flag))
        ]
