"""FSDP2's gradients under the engine: its units reduce in the window's last backward, and in no other.

Until then sums lie in the unsharded parameters' `.grad`. What torch reduces is the plain sum over ranks;
1/count comes in afterwards, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work, by_dtype
from pyengine.gradients import published
from pyengine.gradients.ddp.sums import packed
from pyengine.gradients.fsdp.deferral import Choice
from pyengine.gradients.fsdp.private import has_run
from pyengine.gradients.fsdp.replay import Replay, keep_buffers
from pyengine.gradients.fsdp.units import Unit, is_counted
from pyengine.gradients.fsdp.unsharded import Unsharded
from pyengine.gradients.settings import Settings
from pyengine.gradients.slots import Saved, local
from pyengine.gradients.sums import SlotNorms
from pyengine.ops.device import send
from pyengine.step.stepper import PlainStepper, Stepper
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.window.verdict import check_agreement
from pyengine.wire import FP32


class FSDPReducer:
    """Gradients that `fully_shard` or `replicate` owns.

    Args:
        model: the outermost unit.
        named: its managed parameters, sharded, in registration order.
        units: its units.
        comm: transport over all ranks of the engine.
        settings: its accumulator "fp32" lets narrow gradients be summed in fp32.
        choices: by unit, when it communicates.

    Attributes:
        counted: by parameter, whether this rank counts its shard in the norm.
        held_bytes: what a window holds to communicate less.
    """

    stepper: Stepper = PlainStepper()

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, Parameter]],
        units: Sequence[Unit],
        *,
        comm: Comm,
        settings: Settings,
        choices: Sequence[Choice],
    ) -> None:
        self.names: Sequence[str] = [name for name, _ in named]
        self.params: Sequence[Parameter] = [param for _, param in named]
        self.counted: Sequence[bool] = [is_counted(param) for param in self.params]
        self._model: Any = model
        self._units, self._comm, self._choices = units, comm, choices
        self.held_bytes = sum(choice.held_bytes for choice in choices)
        for unit in units:
            unit.take(comm)
        self._unsharded = Unsharded(
            model,
            units,
            self.params,
            deferred=[choice.mode == "all" for choice in choices],
            dtype=torch.float32 if settings.kind == "fp32" else None,
            watches=settings.raises,
        )
        self._replay = Replay(model)
        self._one = torch.ones((), device=self.params[0].device)
        index = {id(param): i for i, param in enumerate(self.params)}
        self._norms = []
        for group in by_dtype(self.params):
            plan = packed([local(param).numel() for param in group])
            self._norms.append((group, SlotNorms(plan, [index[id(p)] for p in group], self._one.device)))
        self._divisor: Divisor | None = None
        self._used: tuple[Tensor, Work] | None = None
        self._gave_up = False
        self._is_clean = True
        self._put_back: Callable[[], None] | None = None

    def open(self) -> None:
        """Let earlier backwards reduce what is not deferred."""
        self._reset()
        self._end_padding()
        self._is_clean = False
        self._divisor, self._used, self._gave_up = None, None, False
        for unit, choice in zip(self._units, self._choices, strict=True):
            unit.open(choice.mode, keeps=choice.keeps)

    def begin(self) -> None:
        for param in self.params:
            param.grad = None
        self._unsharded.begin()

    def pad(self) -> None:
        """Let the micro-batch handed out be padding: nothing of it stays."""
        self._end_padding()
        self._put_back = keep_buffers(self._model)
        self._unsharded.is_void = True

    @contextmanager
    def add(self) -> Iterator[None]:
        """Let the body run as under no_sync."""
        yield
        self.collect()

    def collect(self) -> None:
        self._unsharded.count_micro_batch()
        self._end_padding()

    def reduce(self, header: Header) -> None:
        """Run a forward and backward of an old batch, whose gradients are replaced by zeros."""
        self._prepare(header)
        with self._reducing():
            pass
        self._conclude()

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        del roots
        self._prepare(header)
        with self._reducing():
            yield
        self._unsharded.count_micro_batch()
        self._end_padding()
        self._conclude()

    def give_up(self) -> None:
        """Note it; FSDP cannot be made to go on from the middle of a backward."""
        self._gave_up = True
        self._end_padding()
        for unit in self._units:
            unit.rest()

    def finish(self, final: FinalPass) -> None:
        """Read `.grad` once: FSDP has waited and written it already."""
        if self._gave_up:
            final.void = torch.full_like(self._one, torch.nan)
        if self._used is not None:
            self._drop_unused(*self._used)
        self._used = None
        for params, norms in self._norms:
            norms.read(published.parts(params), None, self._one, final)
        if self._divisor is not None:
            self._divisor.leave_to(final)

    def scale_(self, scale: Tensor) -> None:
        for params, norms in self._norms:
            norms.scale_(published.parts(params), scale)

    def blame(self) -> Callable[[int], list[int] | None]:
        return self._unsharded.blame()

    def save(self) -> Saved:
        if problems := self.refuses_load():
            raise RuntimeError(f"state_dict: {problems[0]}")
        return self._unsharded.save(self.names)

    def load(self, saved: Saved, *, done: int) -> None:
        self._unsharded.load(saved, self.names, done=done)

    def refuses_load(self) -> list[str]:
        """Refuse what torch keeps to itself: sums that were scattered already."""
        if all(choice.mode == "all" for choice in self._choices):
            return []
        where = "this window's sums lie partly within FSDP, which reduces some units in every micro-batch "
        return [f"{where}(defer=, or defer_budget_mb=): save and load between windows, or defer all of them"]

    def release(self, *, keeps_grad: bool) -> None:
        """Leave the units as they were; they reduce in every backward again."""
        self._reset()
        self._end_padding()
        self._unsharded.release()
        self._replay.release()
        for unit in self._units:
            unit.release()
        if not keeps_grad:
            for param in self.params:
                param.grad = None

    def _prepare(self, header: Header) -> None:
        """Get ready to reduce, behind a header in which ranks agree: FSDP's own collectives would hang."""
        if header.is_refused():
            check_agreement(header, header.totals(), self._comm)
        # Sums of FSDP's own: nothing rewrites them, and what it sends is never narrower than they are.
        self._divisor = Divisor(header.inv_count, FP32(), in_place=True)

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Let the backward in the body reduce, or another one behind it where the body has none."""
        if not self._replay.is_known and not self._unsharded.is_known:
            self._replay.run()  # raises
        for unit in self._units:
            unit.reduce()
        self._unsharded.has_arrived = False
        with self._unsharded.complete():
            yield
            if not self._unsharded.has_arrived:
                with self._unsharded.voided():
                    self._replay.run()

    def _conclude(self) -> None:
        """Make sure that everything has been reduced, and say what was used here."""
        for unit in self._units:
            unit.rest()
        left = [
            name
            for index, (name, param) in enumerate(zip(self.names, self.params, strict=True))
            if param.grad is None and not self._unsharded.is_missing(index)
        ]
        if left:
            raise RuntimeError(
                f"FSDP has not reduced the gradient of {left[0]!r} ({len(left)} parameters in all) in the "
                "window's last backward, which did not run through the model's own forward: call the model, "
                "not its parts"
            )
        flags = send(self._unsharded.used, torch.uint8, self._one.device)
        self._used = flags, self._comm.all_reduce_max(flags)
        self._is_clean = True

    def _drop_unused(self, flags: Tensor, work: Work) -> None:
        """Leave no gradient where no rank has used a parameter, as the flags say once `work` has landed."""
        work.wait()
        if not all(self._unsharded.used):  # a host read, only here
            for param, is_used in zip(self.params, flags.tolist(), strict=True):
                if not is_used:
                    param.grad = None

    def _reset(self) -> None:
        """Let FSDP forget a window that did not come to its end."""
        if not self._is_clean and has_run(self._model):
            self._model.reset_iter_state()
        self._is_clean = True

    def _end_padding(self) -> None:
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        self._unsharded.is_void = False
