"""The part of `Sync` that tells where in its window the loop is."""

from __future__ import annotations

from pyengine.engine.has_engine import HasEngine
from pyengine.window.counter import State, check_accumulate


class Position(HasEngine):
    """Which window it is, which micro-batches this rank has of it, and whether it ends."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full window on this rank: `accumulate`, or what was set since.

        Set it between two windows, on every rank alike. Setting raises ValueError for no whole number from 1
        on, and with accumulator="exact", whose bits depend on it; RuntimeError inside a window.
        """
        return self._engine.counter.accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        wrong = check_accumulate(steps)
        if wrong:
            raise ValueError("gradient_accumulation_steps" + wrong[0].removeprefix("accumulate"))
        self._engine.resize(steps)

    @property
    def is_sync_step(self) -> bool:
        """Whether the window gets no further micro-batch: this is its last one, it has none left,
        or it was flushed.
        """
        return self._engine.counter.ends

    @property
    def is_padding(self) -> bool:
        """Whether the micro-batch handed out last is a batch once more, which only other ranks need: over a
        sharded model a rank that has run out runs the others' forwards with them. Nothing of it counts.
        """
        return self._engine.current.is_padding

    @property
    def landed(self) -> object | None:
        """What tells this window from every other one, once it has landed; None before."""
        return self._engine.current.verdict

    @property
    def window(self) -> int:
        """Index of the window, from 0; it goes up when the next one begins."""
        return self._engine.counter.index

    @property
    def place(self) -> int:
        """Index, in its window over all ranks, of the micro-batch handed out last;
        see `pe.micro_batch_rng`.
        """
        places = self._engine.counter.places
        if self.is_padding:
            return places[-1] if places else 0
        if not places:
            raise RuntimeError("place: no micro-batch has been handed out in this window")
        return places[-1]

    @property
    def is_slot_end(self) -> bool:
        """Whether no slot, as `pe.Exact(slots=...)` cuts the window, is half summed: behind a backward
        `state_dict` may be called. True everywhere without slots.
        """
        engine = self._engine
        return engine.counter.state is not State.OPEN or not engine.current.runs.is_open

    @property
    def due(self) -> list[int]:
        """Places of the window's micro-batches that this rank is still to compute,
        for `WindowSampler.set_epoch`.
        """
        counter = self._engine.counter
        return list(counter.due if counter.state is State.OPEN else counter.share)
