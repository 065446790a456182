"""Several losses in one window that are means over different items: tokens, sequences, prompts.

The window has a single divisor, and the total count of each loss is known before the first backward. A loss
with a different total is multiplied by the ratio of the divisor to this total, so that one division is
correct for all losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The key of a count that the user gave as a plain number.
ONLY = "count"

Loss = Tensor | Mapping[str, Tensor | float]


def base_of(totals: Mapping[str, float]) -> str:
    """Return the name of the loss whose total is the divisor: the first loss with a nonzero total."""
    return next((name for name, total in totals.items() if total), next(iter(totals), ONLY))


@dataclass
class Denominators:
    """The counts by which a window's losses are divided: per micro-batch, and in total over all ranks."""

    # The count of each loss over all ranks and micro-batches, in the order in which losses are added. Empty
    # if no rank has data.
    totals: Mapping[str, float]
    counts: Sequence[Mapping[str, float]]  # counts by loss, one mapping per micro-batch, in order

    def __post_init__(self) -> None:
        self.base = base_of(self.totals)
        self._has_several_out = False

    def take(self, done: int, *, handed: int) -> float:
        """Return the count that the next micro-batch adds to the divisor; 0 for padding."""
        self._has_several_out |= handed - done > 1
        return self.counts[done][self.base] if done < len(self.counts) else 0.0

    def counted(self, losses: Loss, done: int) -> Iterator[tuple[Tensor, float]]:
        """Yield the losses of a micro-batch with their counts; nothing for padding."""
        counts = self.counts[done] if done < len(self.counts) else {}
        named = losses if isinstance(losses, Mapping) else {self.base: losses}
        for name, loss in named.items():
            if name in counts and isinstance(loss, Tensor):
                yield loss, counts[name]

    def problems(self, done: int, *, handed: int) -> list[str]:
        """Return the reasons why a completed window's gradient cannot be divided by its counts."""
        counted = len(self.counts)
        why = ""
        if len(self.totals) > 1 and done < counted:
            why = (
                f"the losses were weighed by totals that count {counted} micro-batches of this rank. Run a "
                "backward for each of them; to leave a micro-batch out, use a loss of 0"
            )
        elif self._has_several_out and done < handed:
            why = (
                f"{handed} micro-batches were handed out, several of them before their backwards, so it "
                "is not known whose counts to leave out. Run every backward; to leave a micro-batch out, "
                "multiply its loss by 0"
            )
        return [f"window ended after {done} backwards, and {why}"] if why else []

    def weigh(self, losses: Loss, device: torch.device) -> Tensor:
        """Return the weighted sum of the losses as a 0-dim tensor: Σ loss × (divisor / total of the loss).

        After the division the result is the sum of the mean losses. A loss with a total of 0 is left out,
        whatever its value, so no backward runs through its graph.

        Raises:
            ValueError: the names of the losses and of the counts differ, or a loss is not a 0-dim tensor.
        """
        if not isinstance(losses, Mapping):
            if len(self.totals) > 1:
                raise ValueError(
                    f"loss: got a single loss, but this window has counts for {self._names}; expected a dict "
                    "with one loss per name (0 for a name with no items)"
                )
            return losses
        self._check(losses)
        terms = [self._term(name, losses[name]) for name, total in self.totals.items() if total]
        known = [term for term in terms if term is not None]
        if not known:
            return torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        return sum(known[1:], start=known[0])

    def _term(self, name: str, loss: Tensor | float) -> Tensor | None:
        if not isinstance(loss, Tensor):
            return None
        if name == self.base:
            return loss
        # Use float32, because a 16-bit dtype would round the ratio.
        wide = loss.float() if loss.dtype.itemsize < torch.float32.itemsize else loss
        return wide * (self.totals[self.base] / self.totals[name])

    def _check(self, losses: Mapping[str, Tensor | float]) -> None:
        if losses.keys() != self.totals.keys():
            raise ValueError(
                f"loss: got {', '.join(map(repr, losses)) or 'an empty dict'}, but this window has counts "
                f"for {self._names}; expected a dict with one loss per name (0 for a name with no items)"
            )
        for name, loss in losses.items():
            if got := _unlike_loss(loss):
                raise ValueError(
                    f"loss[{name!r}]: got {got}, expected a 0-dim floating-point tensor, summed over the "
                    "items that were counted, or 0 if there are none"
                )

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self.totals))


def _unlike_loss(loss: object) -> str:
    """Describe an object that is not a loss; return an empty string for a valid loss or 0."""
    if isinstance(loss, Tensor):
        is_floating = loss.is_floating_point()
        return str(list(loss.shape)) if loss.dim() else "" if is_floating else str(loss.dtype)
    return "" if type(loss) in (int, float) and loss == 0 else repr(loss)
