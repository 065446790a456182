"""The loss scale: torch's, with its finite check and unscaling from the engine's final pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyengine.ops.device import send
from pyengine.window.final_pass import FinalPass


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that takes norm, finite check and unscaling from the engine's final pass.

    Assign it to `sync.scaler`; the engine then scales losses in `backward`, folds the inverse scale into the
    pending scalar, and updates the scale in `step`. Arguments and state are torch's; with equal gradients the
    parameters stay bit-equal to the stock scaler's (its scales are powers of two).
    """

    _final: FinalPass | None = None

    def bind(self, final: FinalPass) -> None:
        """Use the finite check of `final` from now on.

        Raises:
            ValueError: the scaler is bound to another engine's.
        """
        if self._final is not None and self._final is not final:
            raise ValueError(
                "scaler belongs to another engine, whose overflows it follows: make one GradScaler an engine"
            )
        self._final = final
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(final.sumsq.device)

    def unbind(self) -> None:
        """Belong to no engine any more; scale and its growth stay."""
        self._final = None

    def follow(self) -> None:
        """Update the scale after a window that other ranks step and this one drops,
        as `update` does there.
        """
        if self._final is not None and self._scale is not None:
            assert self._growth_tracker is not None  # torch makes it with the scale
            torch._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                self._final.overflow,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )

    def current_scale(self) -> Tensor:
        """Return the scale as a 0-dim float32 tensor that later updates leave alone, without a host read."""
        assert self._scale is not None
        return self._scale.clone()

    def settings(self) -> str:
        """Describe what moves the scale; equal on every rank."""
        return (
            f"growth_factor={self._growth_factor}, backoff_factor={self._backoff_factor}, "
            f"growth_interval={self._growth_interval}"
        )

    def inv_scale(self) -> Tensor:
        """Return 1 / scale as a 0-dim float64 tensor, without a host read."""
        return self.current_scale().double().reciprocal()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Sent, not filled in there: a lazy device would take them for constants of its first program.
        self._scale = send([self._init_scale], torch.float32, dev).reshape(())
        self._growth_tracker = send([self._init_growth_tracker], torch.int32, dev).reshape(())

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        if self._final is None:
            return super()._unscale_grads_(*args, **kwargs)
        return {self._final.overflow.device: self._final.overflow.clone()}
