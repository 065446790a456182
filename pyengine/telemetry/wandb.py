"""Records of steps in a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from pyengine.step.step_record import StepRecord
from pyengine.telemetry.base import Listener, numbers


class Wandb(Listener):
    """Log every number of a `StepRecord` as `pyengine/<name>`, over the axis `pyengine/step`.

    Your own `run.log` calls keep their steps. Offline runs and resumed runs work.

    Args:
        run: what `wandb.init` returned on the rank that writes; the other ranks may pass None.
        rank: the rank that writes.

    Example:
        >>> run = wandb.init(project="gpt", mode="offline")  # doctest: +SKIP
        >>> sync.on_step(Wandb(run))  # doctest: +SKIP
    """

    def __init__(self, run: Any, *, rank: int = 0) -> None:
        super().__init__(rank=rank)
        self._run = run
        if self.writes and run is None:
            raise ValueError(
                f"run: got None on rank {rank}, which writes; need the run that wandb.init returned"
            )
        if self.writes:
            run.define_metric("pyengine/step")
            run.define_metric("pyengine/*", step_metric="pyengine/step")

    def _write(self, record: StepRecord) -> None:
        named = {f"pyengine/{name}": value for name, value in numbers(record).items()}
        self._run.log({"pyengine/step": record.step, **named})
        if record.skipped:
            self._run.summary["pyengine/last_skip"] = f"step {record.step}: {record.reason}"
