"""FSDP2's gradients under the engine: its units reduce in the window's last backward, and in no other.

Until then sums lie in the unsharded parameters' `.grad`. What torch reduces is the plain sum over ranks;
1/count comes in afterwards, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pyengine.gradients.fsdp.private import reduce_dtype
from pyengine.gradients.fsdp.replay import Replay
from pyengine.gradients.fsdp.sharded import Managed, Sharded
from pyengine.gradients.published import Published
from pyengine.gradients.residuals import Residuals
from pyengine.gradients.slots import Saved
from pyengine.gradients.used_anywhere import Told
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.window.verdict import check_agreement
from pyengine.wire import FP32, Wire

_LEFT = (
    "an exception has left the window's last backward on this rank, FSDP cannot go on from its middle, and "
    "other ranks wait in it"
)


class FSDPReducer(Sharded):
    """Gradients that `fully_shard` or `replicate` owns.

    Args:
        managed: what of the model is driven.

    Attributes:
        residuals: what the wire loses, of whole parameters.
    """

    overlaps = True

    def __init__(self, managed: Managed) -> None:
        settings = managed.settings
        super().__init__(managed, watches=settings.raises)
        # 1/count comes in before a wire that wants means where everything waits for it, else behind the sum.
        waits = all(
            choice.mode == "all" and (unit.narrows(settings.wire) or reduce_dtype(unit.module) is None)
            for unit, choice in zip(self.units, self.choices, strict=True)
        )
        keys = {name: name for name, param in managed.named if param.requires_grad}
        self.residuals = Residuals([(self.wire.memory, keys)], settings.wire)
        self._travels_as: Wire = settings.wire if waits else FP32()
        self._replay = Replay(managed.model)
        self._published = Published(self.names, self.params)
        self._nan = torch.full((), torch.nan, dtype=torch.float32, device=self.params[0].device)
        self._divisor: Divisor | None = None
        self._told: Told | None = None
        self._gave_up = False

    def open(self) -> None:
        super().open()
        self._divisor, self._told, self._gave_up = None, None, False

    def collect(self) -> None:
        if self._is_apart:
            self.unsharded.absorb()
        self.unsharded.count_micro_batch()
        self.end_padding()

    def reduce(self, header: Header) -> None:
        """Run a forward and backward of an old batch, whose gradients are replaced by zeros."""
        self._prepare(header)
        if self._is_apart:
            self.unsharded.join()
        with self._reducing():
            pass
        self.end_padding()
        self._conclude(header)

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        del roots
        self._prepare(header)
        with self._reducing():
            yield
        self.unsharded.count_micro_batch()
        self.end_padding()
        self._conclude(header)

    def give_up(self) -> None:
        """Tell the other ranks, if FSDP's part was over; it cannot go on from the middle of a backward."""
        self._gave_up = True
        self.end_padding()
        for unit in self.units:
            unit.rest()
        if self._divisor is not None and self._told is None:
            self._told = self.used.tell(self.unsharded.used)

    def finish(self, final: FinalPass) -> None:
        """Read `.grad` once: FSDP has waited and written it already."""
        if self._gave_up:
            final.void = self._nan
        if self._told is not None:
            try:
                self._told.drop_unused(self.params)
            except RuntimeError as error:
                raise RuntimeError(f"{_LEFT}: {error}" if self._gave_up else str(error)) from error
        self._told = None
        self._published.read(final, None if self._divisor is None else self._divisor.after_wire())

    def blame(self) -> Callable[[int], list[int] | None]:
        return self.unsharded.blame()

    def save(self) -> Saved:
        if refusal := self.refuses_load():
            raise RuntimeError(f"state_dict: {refusal[0]}")
        saved = self.unsharded.save(self.names)
        for name, parts in saved.items():
            parts |= self.unsharded.saved_flags(self.names.index(name))
        return saved

    def load(self, saved: Saved, *, done: int) -> None:
        self.unsharded.load(saved, self.names, done=done)

    def sum_forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return self.unsharded.sum_forms(self.names)

    def refuses_load(self) -> list[str]:
        """Refuse states in the middle of a window whose sums are partly scattered: they are in FSDP's memory,
        and there is no place for them in a state of another mesh.
        """
        return [
            f"unit {unit.name!r} has defer={choice.mode!r}, so the sums of an open window are in FSDP's "
            "reduced shards: save and load between windows, behind sync.step, or attach with defer='all', "
            "which keeps whole sums until the window ends"
            for unit, choice in zip(self.units, self.choices, strict=True)
            if choice.mode != "all" and any(param.requires_grad for param in unit.params)
        ][:1]

    def release(self, *, keeps_grad: bool) -> None:
        super().release(keeps_grad=keeps_grad)
        self._replay.release()

    def _prepare(self, header: Header) -> None:
        """Get ready to reduce, behind a header in which ranks agree: FSDP's own collectives would hang."""
        if header.is_refused():
            check_agreement(header, header.totals(), self.comm)
        self._divisor = Divisor(header.inv_count, self._travels_as, header.inv_scale)
        self.wire.before = self._divisor.before_wire
        self.wire.memory.begin(header.position[0])

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Let the backward in the body reduce, or another one behind it where the body has none."""
        if not self._replay.is_known and not self.unsharded.is_known:
            self._replay.run(self.spare)  # raises
        for unit in self.units:
            unit.reduce()
        self.unsharded.has_arrived = False
        with self.unsharded.complete():
            yield
            if not self.unsharded.has_arrived:
                with self.unsharded.voided():
                    self._replay.run(self.spare)

    def _conclude(self, header: Header) -> None:
        """Make sure that everything has been reduced, and say what was used here."""
        for unit in self.units:
            unit.rest()
        left = [
            name
            for index, (name, param) in enumerate(zip(self.names, self.params, strict=True))
            if param.grad is None and not self.unsharded.is_missing(index)
        ]
        if left and not header.totals().invalid_counts:  # a refusal says more
            raise RuntimeError(
                f"FSDP has not reduced the gradient of {left[0]!r} ({len(left)} parameters in all) in the "
                "window's last backward, which did not run through the model's own forward: call the model, "
                "not its parts"
            )
        self._told = self.used.tell(self.unsharded.used)
        self.is_clean = True
