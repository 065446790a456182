"""The records of windows; a record is created when the host has read the results of its window."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial

from torch import Tensor

from pyengine.comm.base import Traffic
from pyengine.engine.window import Window
from pyengine.ops.device import Readback
from pyengine.step.step_record import StepCallback, StepRecord
from pyengine.window.header import Totals
from pyengine.window.metric import Metric
from pyengine.window.verdict import Verdict, call_all


class WindowRecords:
    """Creates the `StepRecord` of every window with an optimizer step, and passes it to the callbacks."""

    def __init__(self) -> None:
        # The callbacks that receive the records, by id.
        self.callbacks: OrderedDict[int, StepCallback] = OrderedDict()
        # A function that creates the record of the last step whose results the host has read.
        self.make_last: Callable[[], StepRecord] | None = None

    def of(
        self,
        window: Window,
        verdict: Verdict,
        norm: Tensor,
        *,
        metrics: Sequence[Metric],
        traffic: Traffic,
        held_bytes: int,
    ) -> Callable[[Totals, bool], None]:
        """Stop the window's clock, and return a function that creates the record and runs callbacks.

        Args:
            window: the window that was stepped.
            verdict: the outcome of the window.
            norm: the norm of the window's gradients before clipping, as a 0-dim tensor.
            metrics: the metrics of the window.
            traffic: the numbers of collectives and bytes that the engine has sent.
            held_bytes: the value of the record's field `held_bytes`.

        Returns:
            A function that takes the sums over all ranks, and whether the step was skipped.
        """
        clock, num_retries = window.clock, window.num_retries
        collectives, bytes_sent = window.traffic(traffic)
        # Read back the norm and metrics even without callbacks, because all ranks must run the same programs.
        index, grad_norm = verdict.report.index, Readback(norm.reshape(1))
        unread = [(metric, Readback(metric.numbers())) for metric in metrics]
        clock.stop()

        def emit(totals: Totals, skips: bool) -> None:
            measured = {each.field: each.record(numbers.get(), skipped=skips) for each, numbers in unread}

            @cache
            def make_record() -> StepRecord:
                return StepRecord(
                    step=index,
                    micro_batches=totals.micro_batches,
                    count=totals.count,
                    loss=totals.loss / totals.count if totals.count and not totals.unknown_losses else None,
                    grad_norm=grad_norm.get()[0],
                    skipped=skips,
                    reason=verdict.reason,
                    bytes_on_wire=bytes_sent,
                    collectives=collectives,
                    backward_s=clock.seconds("backward"),
                    exposed_sync_s=clock.seconds("exposed_sync"),
                    step_s=clock.elapsed(),
                    held_bytes=held_bytes,
                    num_retries=num_retries,
                    **measured,
                )

            self.make_last = make_record
            if self.callbacks:  # without callbacks the host does not wait for the device's timing events
                call_all([partial(callback, make_record()) for callback in self.callbacks.values()])

        return emit
