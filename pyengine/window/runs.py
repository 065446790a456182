"""Runs of micro-batches: what one deposit into an exact sum is made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Runs:
    """This rank's runs of one window: neighbours by place, as `pe.Exact(slots=...)` cuts the window.

    The public name of a run is slot, which in this package is a parameter's place in a bucket. The gradients
    of a run are added up where autograd adds, and what they have become is accumulated once, so whoever owns
    the gradients notes flags by run, and micro-batches are named here.
    """

    def __init__(self, size: int, *, done: int = 0) -> None:
        self.size = size
        # Whether the last run is half summed: what its micro-batches brought has not been accumulated.
        self.is_open = False
        self._run_of = list(range(done))
        self._num_ended = done

    def ends_at(self, place: int) -> bool:
        """Whether the micro-batch at a place, counted in the window over all ranks, is its run's last."""
        return (place + 1) % self.size == 0

    def add(self, *, ends: bool) -> None:
        """Count a micro-batch; `ends`: its run is accumulated with it."""
        self._run_of.append(self._num_ended)
        self._num_ended += ends
        self.is_open = not ends

    def end(self) -> None:
        """Note that the run that is open has been accumulated as it is."""
        self._num_ended += self.is_open
        self.is_open = False

    def blame(self, by_run: Callable[[int], list[int] | None]) -> Callable[[int], list[int] | None]:
        """Return a function of micro-batches, all of a run, from a function of runs; None stays None."""
        run_of = self._run_of

        def by_micro_batch(param: int) -> list[int] | None:
            runs = by_run(param)
            return None if runs is None else [i for i, run in enumerate(run_of) if run in runs]

        return by_run if self.size == 1 else by_micro_batch

    def spread(self, flags: Tensor) -> Tensor:
        """Return flags by micro-batch, `[micro_batches]`, from flags by run, `[runs]`."""
        if self.size == 1:
            return flags
        return flags[torch.tensor(self._run_of, dtype=torch.int64, device=flags.device)]
