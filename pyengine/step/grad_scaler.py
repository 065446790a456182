"""torch's loss scaler, except that the engine checks for inf and nan and unscales the gradients.

The engine does both in its own pass over the gradients.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pyengine.ops.device import send
from pyengine.window.counter import WindowCounter
from pyengine.window.final_pass import FinalPass


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that leaves the finite check and the unscaling to the engine.

    Assign it to `sync.scaler`, which also converts a torch GradScaler to this class. The engine then scales
    losses in `backward`, unscales gradients when it divides by the count, and updates the scale in `step`. In
    a `micro_batch` block the caller scales losses: `scaler.scale(loss).backward()`. Arguments and state are
    the same as in torch. Given equal gradients, this scaler and torch's scaler (with scales that are powers
    of two) produce bit-equal parameters.

    Attributes:
        has_scaled: whether the scaler has scaled a loss since the last reduction.
    """

    _final: FinalPass | None = None
    _counter: WindowCounter | None = None
    has_scaled = False

    def bind(self, final: FinalPass, counter: WindowCounter) -> None:
        """Use the finite check of an engine (`final`). The scale does not change within a window.

        Raises:
            ValueError: the scaler already belongs to another engine.
        """
        if self._final is not None and self._final is not final:
            raise ValueError(
                "scaler belongs to another engine, whose overflows it follows: create one GradScaler per "
                "engine"
            )
        self._final, self._counter = final, counter
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(final.sumsq.device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients as torch's scaler does.

        Raises:
            RuntimeError: the scaler belongs to an engine, which unscales the gradients.
        """
        self._check_free("unscale_", "leave it out, because .grad is unscaled once the window has ended")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer as torch's scaler does.

        Raises:
            RuntimeError: the scaler belongs to an engine, which decides whether to skip the step.
        """
        self._check_free("step", "call sync.step(optimizer) instead")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale as torch's scaler does.

        Raises:
            RuntimeError: the scaler belongs to an engine, and `new_scale` is None or a window is in progress.
        """
        if new_scale is None:
            self._check_free("update", "leave it out, because sync.step(optimizer) updates the scale")
        self._check_between("scaler.update")
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch's scaler does.

        Raises:
            RuntimeError: a window is in progress.
            ValueError: the state has numbers that no scaler can have.
        """
        self._check_between("scaler.load_state_dict")
        if wrong := list(state_problems(state_dict)):
            raise ValueError(f"load another state: this one has {wrong[0]}")
        super().load_state_dict(state_dict)

    def _check_between(self, what: str) -> None:
        if self._counter is not None and self._counter.is_accumulating:
            raise RuntimeError(
                f"{what} in the middle of window {self._counter.index}, some of whose losses have "
                "already been scaled: call it after sync.step(), or first discard the window with "
                "sync.abandon()"
            )

    def _check_free(self, what: str, instead: str) -> None:
        if self._final is not None:
            raise RuntimeError(
                f"{instead}: the engine does the work of scaler.{what} after `sync.scaler = scaler`"
            )

    def scale(self, outputs: Any) -> Any:
        """Scale losses as torch's scaler does."""
        self.has_scaled = True
        if isinstance(outputs, list | tuple):  # torch's scaler would use a copy of the scale
            return type(outputs)(map(self.scale, outputs))
        return super().scale(outputs)

    def unbind(self) -> None:
        """Detach the scaler from its engine; the scale and the growth tracker are kept."""
        self._final = self._counter = None

    def follow(self) -> None:
        """Update the scale after a reduced window, depending on `overflow`, in the same way on every rank."""
        if self._final is not None and self._scale is not None:
            assert self._growth_tracker is not None  # torch creates the tracker together with the scale
            torch._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                self._final.overflow,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )

    @property
    def scale_tensor(self) -> Tensor | None:
        """The tensor by which losses are multiplied, or None if it has not been created yet."""
        return self._scale

    def current_scale(self) -> Tensor:
        """Return a copy of the scale as a 0-dim float32 tensor, without synchronizing with the device."""
        assert self._scale is not None
        return self._scale.clone()

    def settings(self) -> str:
        """Describe the settings that control the scale, which are equal on every rank."""
        return (
            f"growth_factor={self._growth_factor}, backoff_factor={self._backoff_factor}, "
            f"growth_interval={self._growth_interval}"
        )

    def inv_scale(self) -> Tensor:
        """Return 1 / scale as a 0-dim float64 tensor, without synchronizing with the device."""
        return self.current_scale().double().reciprocal()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Send the scale from the host: a value created on a lazy (XLA) device would be baked into the first
        # compiled program as a constant.
        self._scale = send([self._init_scale], torch.float32, dev).reshape(())
        self._growth_tracker = send([self._init_growth_tracker], torch.int32, dev).reshape(())


# Valid numbers in the state of a scaler. The scale is a float32 and the growth tracker an int32. The
# ranges of the factors are wider than those of torch's constructor, because torch's setters accept more.
_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "scale": (lambda value: 2.0**-149 <= value <= (2 - 2**-23) * 2.0**127, "a float32 above 0"),
    "growth_factor": (lambda value: 1 <= value < math.inf, "a finite number of at least 1"),
    "backoff_factor": (lambda value: 0 < value <= 1, "a number above 0 and up to 1"),
    "growth_interval": (
        lambda value: isinstance(value, Integral) and 0 <= int(value) < 2**63,
        "a whole number from 0 to 2**63 - 1",
    ),
    "_growth_tracker": (
        lambda value: isinstance(value, Integral) and 0 <= int(value) < 2**31 - 1,
        "a whole number from 0 to 2**31 - 2",
    ),
}


def state_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of invalid numbers in the state of a scaler."""
    for name, (is_one, need) in _NUMBERS.items():
        value = state.get(name, 1)
        is_wide = isinstance(value, int) and abs(value) >= 2**63  # torch rejects such an int, even as a scale
        if name in state and (is_wide or not is_one(value)):
            yield f"scaler[{name!r}]={reprlib.repr(value)}, expected {need}"


def taken_over(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler for an engine; torch's own scaler is converted in place and keeps its state."""
    kind = type(scaler)
    if kind.__name__ == "GradScaler" and kind.__module__.startswith("torch."):  # or a device's subclass
        scaler.__class__ = GradScaler
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler is a {type(scaler).__name__}: expected a torch.amp.GradScaler, which the engine takes "
            "over, or a pyengine.GradScaler; the behavior of another class would be lost"
        )
    return scaler


def copy_of(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a copy of a scaler, for one of several engines that share a torch scaler."""
    if type(scaler) not in (torch.amp.GradScaler, GradScaler):
        raise TypeError(
            f"the loss scaler is a {type(scaler).__name__}, whose behavior would be lost: expected a "
            "torch.amp.GradScaler, which the engine takes over, or a pyengine.GradScaler"
        )
    ours = GradScaler(scaler._device, enabled=scaler.is_enabled())  # noqa: SLF001 - torch has no public name
    ours.load_state_dict(scaler.state_dict())
    return ours
