"""What the ranks conclude together of a window that has landed: errors are the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyengine.header import LocalWindow, Totals
from pyengine.reducer import Reducer
from pyengine.report import RankFindings, describe, nonfinite_params


def check_agreement(totals: Totals, comm: Any, *, position: tuple[int, int], local: LocalWindow) -> None:
    """Raise on every rank if ranks are at different places or any of them gave an invalid count.

    Args:
        totals: what the header brought.
        comm: transport; used only to say who differs.
        position: this rank's (windows completed, optimizer steps taken).
        local: this rank's counts.

    Raises:
        RuntimeError: ranks are at different windows or steps.
        ValueError: a count is negative or not finite.
    """
    if totals.steps_differ or totals.optimizer_steps_differ:
        positions = comm.all_gather_object(position)
        places = "; ".join(f"rank {r}: {w} windows, {s} steps" for r, (w, s) in enumerate(positions))
        raise RuntimeError(
            f"ranks are not at the same place ({places}): some rank abandoned a window that was already reduced, "
            "or stepped without the others. Restore all ranks from one checkpoint"
        )
    if totals.invalid_counts:
        problems = comm.all_gather_object(local.problems())
        places = "; ".join(f"rank {r}: {text}" for r, texts in enumerate(problems) for text in texts)
        raise ValueError(
            f"{places}: count must be finite and not negative (0 leaves a micro-batch out of the divisor). "
            "Nothing was stepped; call sync.abandon() and go on"
        )


def why_not_finite(
    nonfinite: Tensor, comm: Any, reducer: Reducer, *, local: LocalWindow, gave_up: str
) -> str:
    """Gather what every rank knows of a window with inf or nan, and say where they came from.

    Args:
        nonfinite: uint8 `[num_params]`, flags of the reduced gradients, equal on every rank.
        comm: transport.
        reducer: knows which micro-batches brought them on this rank.
        local: this rank's losses.
        gave_up: the exception that ended this rank's last backward, as text.
    """
    params = nonfinite_params(nonfinite)
    mine = RankFindings(gave_up, local.nonfinite_losses(), [reducer.blame(param) for param in params])
    findings: Sequence[RankFindings] = comm.all_gather_object(mine)
    return describe([reducer.names[param] for param in params], findings)
