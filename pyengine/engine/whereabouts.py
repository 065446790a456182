"""Where an engine stands, in words, for those who wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pyengine.engine.engine import Engine


def whereabouts_of(engine: Engine) -> Callable[[], str]:
    """Return what tells any thread an engine's step, window and micro-batch, and does not keep it alive."""
    ref = weakref.ref(engine)

    def tell() -> str:
        engine = ref()
        if engine is None:
            return "the end of its engine"
        counter, gave_up = engine.counter, engine.current.gave_up
        return (
            f"step {engine.verdicts.steps_taken}, window {counter.index}, micro-batch {counter.handed} of "
            f"{counter.accumulate} ({counter.state.value}{f', left by {gave_up}' if gave_up else ''})"
        )

    return tell
