"""What an audit has found, and the error that reports it on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One way in which something parts.

    Attributes:
        what: "gradient", "parameter", "optimizer state", "hyperparameters", "buffer" or "divisor".
        names: of all that part in this way, in the model's order; empty where it is no matter of one.
        ranks: that are known to be wrong or to have something of their own; empty: all of them, or it cannot
            be told which.
        cause: the likely one.
        step: the window in which it was found.
        since: the first window in which it may have begun: the one behind the last clean check.
    """

    what: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    cause: str
    step: int
    since: int

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        whose = f" of {self.names[0]!r}{more}" if self.names else ""
        who = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        since = "" if self.since == self.step else f", since step {self.since} at the earliest"
        return f"{self.what}{whose}{who}, at step {self.step}{since}: {self.cause}"


class AuditError(RuntimeError):
    """Ranks differ, or a reduction and its inputs do; the same on every rank.

    Attributes:
        findings: what was found, the likeliest root first.
    """

    def __init__(self, text: str, findings: Sequence[Finding]) -> None:
        super().__init__(text)
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[type[AuditError], tuple[str, tuple[Finding, ...]]]:
        return type(self), (str(self), self.findings)
