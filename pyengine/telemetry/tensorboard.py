"""A listener that writes step records to TensorBoard."""

from __future__ import annotations

import os

from pyengine.step.step_record import StepRecord
from pyengine.telemetry import Listener, numbers

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        "pyengine.telemetry.tensorboard needs tensorboard, which is not installed: pip install "
        "'.[telemetry]' in a clone of pyengine"
    ) from error


class TensorBoard(Listener):
    """Write every number of a `StepRecord` as the scalar `pyengine/<name>`.

    The reason for a skipped step is written as text.

    Args:
        log_dir: folder for the event files; a resumed run adds another file.
        rank: the rank that writes the event files.

    Example:
        >>> from pyengine.telemetry.tensorboard import TensorBoard  # doctest: +SKIP
        >>> sync.on_step(TensorBoard("runs/gpt"))  # doctest: +SKIP
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, rank: int = 0) -> None:
        super().__init__(rank=rank)
        if self.writes:
            self._writer = SummaryWriter(os.fspath(log_dir))

    def _write(self, record: StepRecord) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(f"pyengine/{name}", value, record.step)
        if record.skipped:
            self._writer.add_text("pyengine/reason", record.reason, record.step)

    def close(self) -> None:
        """Flush and close the writer; otherwise events are flushed every two minutes."""
        if self.writes:
            self._writer.close()
