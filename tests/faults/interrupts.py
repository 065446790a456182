"""An interrupt at any place of the package's code, and training that goes on behind it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyengine as pe
from pyengine.comm import watch as comm_watch

PACKAGE = str(Path(pe.__file__).parent)
ACCUMULATE = 2

# The engine's arguments, by name.
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "exact": {"accumulator": "exact"},
    "int8": {"wire": pe.wire.ErrorFeedback(pe.wire.Int8(block=32))},
    "bf16": {"wire": pe.wire.BF16(sum="fp32")},
}


class Interrupt:
    """Raises an error at the `number`-th place: where a function of the package begins or returns, and where
    it has called one of C, since there Python looks for signals.

    Args:
        number: from 1; 0 only counts.
        kind: of the error.
    """

    def __init__(self, number: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.num_places, self.place = 0, ""
        self._number, self._kind = number, kind

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        # An exception at a yield, or where a generator expression is left unread, would reach nobody.
        is_generator = code.co_flags & 0x20 and event != "c_return"
        if event == "c_call" or is_generator or not code.co_filename.startswith(PACKAGE):
            return
        self.num_places += 1
        if self.num_places == self._number:
            sys.setprofile(None)
            self.place = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {event}"
            raise self._kind


def batches(seed: int, num: int = 2 * ACCUMULATE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 3, (2, 3), generator=generator).float() for _ in range(num)]


@dataclass
class Training:
    """A small model with a bucket for each parameter."""

    options: dict[str, Any]
    scaled: bool = False
    model: nn.Sequential = field(default_factory=lambda: _integers(nn.Linear(3, 4), nn.Linear(4, 2)))

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.sync = pe.GradSync(self.model, accumulate=ACCUMULATE, bucket_cap_mb=1e-5, **self.options)
        if self.scaled:
            self.sync.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.steps: list[pe.StepRecord] = []
        self.sync.on_step(self.steps.append)

    def loop(self, data: list[Tensor]) -> None:
        for window in self.sync.windows(data):
            for x in window:
                self.sync.backward(self.model(x).square().sum(), count=len(x))
            self.sync.clip_grad_norm_(2.0)
            self.sync.step(self.optimizer)

    def loop_of_accumulate(self, data: list[Tensor]) -> None:
        for x in data:
            with self.sync.accumulate():
                self.sync.backward(self.model(x).square().sum(), count=len(x))
            if self.sync.is_sync_step:
                self.sync.step(self.optimizer)

    def twin(self) -> Training:
        """Return a training of a new engine that stands where this one does."""
        other = Training(self.options, self.scaled)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        if self.sync.scaler is not None:
            other.sync.scaler.load_state_dict(self.sync.scaler.state_dict())
        return other

    def numbers(self) -> list[float]:
        scaler = self.sync.scaler
        scale = [] if scale_of(scaler) is None else [scaler.get_scale(), float(scaler._growth_tracker)]
        return [*torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist(), *scale]


def scale_of(scaler: Any) -> Any:
    return None if scaler is None else scaler._scale


def _integers(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((torch.arange(param.numel()) % 3 - 1.0).view_as(param))
    return model


# ---- several ranks ----


@dataclass
class End:
    """How a training ended on one rank: its numbers, or the error that no `abandon` helps against."""

    numbers: list[float]
    error: str = ""
    place: str = ""  # of the interrupt
    num_places: int = 0


def interrupted(way: str, number: int, kind: type[BaseException], victim: int) -> End:
    """Train in a group of its own, with an interrupt on one rank, behind which its loop goes on."""
    comm_watch.WAIT_S = 0.2
    group = dist.new_group(timeout=timedelta(seconds=8))
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training({**WAYS[way], "process_group": group, "stall_after_s": 0.3})
        if rank == victim:
            end = _train(training, Interrupt(number, kind), kind)
        else:
            end = _train(training, Interrupt(0), kind, is_armed=False)
        with suppress(Exception):
            training.sync.close()
    return end


def _train(
    training: Training, interrupt: Interrupt, kind: type[BaseException], *, is_armed: bool = True
) -> End:
    rank = dist.get_rank()
    error = ""
    try:
        training.loop(batches(10 + rank, ACCUMULATE))
        data = batches(20 + rank)
        try:
            if is_armed:
                with interrupt.armed():
                    training.loop(data)
            else:
                training.loop(data)
        except kind as raised:
            if isinstance(raised, RuntimeError):
                raise
            training.sync.abandon()
            training.loop(data[ACCUMULATE * (len(training.steps) - 1) :])
        training.loop(batches(30 + rank))
    except RuntimeError as raised:
        error = str(raised)
    return End(training.numbers(), error, interrupt.place, interrupt.num_places)


def sweep(way: str, numbers: list[int], kind: type[BaseException], victim: int) -> list[End]:
    return [interrupted(way, number, kind, victim) for number in numbers]


def run_of(fn: Callable[[], object]) -> None:
    fn()
