"""Buffers that change while a window runs: their values may depend on which rank ran what."""

from __future__ import annotations

import warnings

from torch import Tensor, nn


class BufferWatch:
    """Warns once, after the first window, of buffers that it has written to or replaced; costs no pass over
    them.

    Args:
        module: the model.
        known: buffers that somebody keeps equal on all ranks.
    """

    def __init__(self, module: nn.Module, known: list[Tensor]) -> None:
        self._module = module
        self._known = {id(buffer) for buffer in known}
        self._before: dict[str, tuple[int, int]] | None = None
        self._is_done = False

    def open(self) -> None:
        """Look before a window."""
        if not self._is_done:
            self._before = self._state()

    def close(self) -> None:
        """Look after a window that was used, and warn."""
        before, self._before = self._before, None
        if self._is_done or before is None:
            return
        self._is_done = True
        changed = [name for name, state in self._state().items() if before.get(name) != state]
        if changed:
            names = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            warnings.warn(
                f"accumulator='exact': the first window changed the buffers {names}. If their values depend "
                "on the micro-batches that this rank ran, or on how many, the run depends on the world "
                "size: update them between windows, from values that are equal on every rank, or keep them "
                "out of the forward (InstanceNorm: track_running_stats=False)",
                stacklevel=4,
            )

    def _state(self) -> dict[str, tuple[int, int]]:
        """Identity and version of every buffer; PyTorch counts a tensor's versions up with every write."""
        return {
            name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in self._module.named_buffers()
            if id(buffer) not in self._known
        }
