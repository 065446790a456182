"""The part of `Sync` that saves and loads: a `Stateful` of `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyengine.engine.checkpoint.resume import load_states, take_snapshot
from pyengine.engine.has_engine import HasEngine


class Stateful(HasEngine):
    """What the engine holds, as a state that goes on bit for bit."""

    _done: Sequence[int] = ()

    @property
    def done(self) -> list[int]:
        """Places that were done on any rank when `load_state_dict` was called, for `Dealer.set_epoch`."""
        return list(self._done)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's engine holds, also in the middle of a window, as tensors and plain values.

        `{"version", "window", "steps", "rank 0 of 2": (content, checksum)}`; so
        `torch.distributed.checkpoint`, for which an engine is a `Stateful`, keeps ranks apart. The content:
        windows and steps completed, the sums, counts, losses and running statistics of the open window's
        micro-batches that are done here, with their places; the loss scale, gradients carried over, what the
        wire has lost and is still to send, and the states of the random generators. Parameters, optimizer and
        scheduler are the caller's to save, as ever. On an accelerator every rank calls this at the same
        point, as `synchronize`.

        With accumulator="exact" the last states of any ranks in a window fit together, whenever each was
        saved.

        Raises:
            RuntimeError: between a micro-batch's hand-out and its backward (so also after one that had no
                backward, for the rest of the window), between the window's last backward and the step, or
                inside a slot of `pe.Exact(slots=...)` (see `is_slot_end`).

        Cost: copies the sums: 4 bytes an element (2 of narrow "native" ones), 8 for "exact". Their checksum
        reads the copy once on the host, about 2 GB/s (a device's is copied there), and so does
        `load_state_dict`.
        """
        return take_snapshot(self._engine).to_dict()

    def load_state_dict(self, states: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` was called, bit for bit; every rank calls this before its loop.

        Args:
            states: this rank's own state, on as many ranks as there were; or a list of the states of all
                ranks, the same on every rank, taken between windows, of which what a wire keeps is then
                shared out among the ranks there are now. With accumulator="exact" the window may be open:
                sums and remaining micro-batches are shared out, too, and a state may be missing, or older
                than others that hold its micro-batches: what is missing is computed again. All of one window,
                that of the parameters (`state["window"]`). One dict may hold the parts of several ranks.

        Nothing of a rank's own is needed but its loader, which goes on behind what is done:
        `sampler.set_epoch(..., due=sync.due)`, or `dealer.set_epoch(..., done=sync.done)`. The generators go
        on from where they were when the loop takes the first micro-batch, if this rank's own state of as many
        ranks is there. (The loader reads one micro-batch ahead: what it draws in this process from them is
        not repeated; see `pe.sample_rng`.) What has to be alike on every world size starts from
        `pe.micro_batch_rng`.

        Raises:
            ValueError: a state is damaged or does not fit, or ranks got different ones; on every rank, and
                nothing has changed. All of a state is checked before any rank loads it.

        Example:
            >>> paths = sorted(folder.glob("sync-*.pt"))  # doctest: +SKIP
            >>> states = [torch.load(path, weights_only=True) for path in paths]  # doctest: +SKIP
            >>> sync.load_state_dict([s for s in states if s["window"] == window])  # doctest: +SKIP
            >>> sampler.set_epoch(0, window=window, due=sync.due)  # doctest: +SKIP
        """
        self._done = load_states(self._engine, states)
