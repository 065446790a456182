"""Clipping, in PyTorch's words, of gradients that a window has brought."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from pyengine.engine.has_engine import HasEngine
from pyengine.ops.device import HOST
from pyengine.window.final_pass import check_max_norm


class Clipping(HasEngine):
    """The part of `Sync` that measures and clips what has landed."""

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients as they are, clipping included; float64, 0-dim, on their device.
        Where ranks hold different elements (shards, experts): as they were reduced, or clipped last.

        Cost: a look at every `.grad`; if one was written to since they were reduced, a read of each.
        """
        engine = self._engine
        engine.finish()
        if not engine.final.is_shared:  # else one rank alone may ask, and the others must not be waited for
            engine.current.renew_norm()
        return engine.final.grad_norm()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Multiply the gradients by min(1, max_norm / norm) and return the norm before clipping, as
        `torch.nn.utils.clip_grad_norm_` does for the parameters of this engine.

        Args:
            max_norm: the largest allowed norm of the mean gradient.
            norm_type: 2.0, or inf for the largest absolute value.
            error_if_nonfinite: raise if the norm is inf or nan, which otherwise skips the step.

        Returns:
            The norm over all parameters and ranks, float64, 0-dim; the same bits on every rank.

        Raises:
            TypeError: no number.
            ValueError: a negative number, or nan; a norm of another type.
            RuntimeError: the norm is not finite under `error_if_nonfinite`, on every rank. Nothing is
                clipped: `sync.step` skips the step, and `sync.abandon()` drops the window.

        Cost: the 2-norm was taken with the finite check; the inf-norm reads the gradients once. One pass that
            reads and writes every gradient; none where the host sees that the norm is within `max_norm`.
            `error_if_nonfinite` waits for the device.
        """
        check_max_norm(max_norm)
        order = _checked_order(norm_type)
        engine = self._engine
        verdict, final = engine.finish(), engine.final
        engine.current.renew_norm()
        norm = final.grad_norm() if order != math.inf else final.inf_norm(engine.parts.published.largest())
        if error_if_nonfinite:
            engine.reach_verdicts()
            _check_finite(norm, order, verdict.reason)
        engine.scale_(final.clip(max_norm, norm))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip every element of the mean gradient to [-clip_value, clip_value], as
        `torch.nn.utils.clip_grad_value_` does. Whether the step is skipped for inf or nan does not change.

        Args:
            clip_value: the largest allowed absolute value, the same on every rank.

        Raises:
            TypeError: no number.
            ValueError: a negative number, or nan.

        Cost: one pass that reads and writes every gradient, and one that reads for the norm (`grad_norm`, and
            a later `clip_grad_norm_`).
        """
        value = _checked_value(clip_value)
        engine = self._engine
        verdict, final = engine.finish(), engine.final
        engine.current.renew_norm()
        final.keep_norm()
        engine.parts.published.clip_values_(value)
        engine.current.renew_norm(has_changed=True)
        # Ranks that clip by another value are found out.
        verdict.use.factors.append(torch.tensor(value, dtype=torch.float64, device=HOST))


def _checked_order(norm_type: object) -> float:
    """Return 2.0 or inf; refuse every other norm."""
    if norm_type == "inf":  # as torch takes it
        return math.inf
    if not isinstance(norm_type, Real) or isinstance(norm_type, bool):
        raise TypeError(f"norm_type={norm_type!r} is a {type(norm_type).__name__}: need 2.0 or inf")
    order = float(norm_type)
    if order not in (2.0, math.inf):
        raise ValueError(
            f"norm_type={norm_type!r}: need 2.0 or inf; for another norm call "
            "torch.nn.utils.clip_grad_norm_ over the parameters, at the same place"
        )
    return order


def _checked_value(clip_value: object) -> float:
    if not isinstance(clip_value, Real) or isinstance(clip_value, bool):
        raise TypeError(
            f"clip_value={clip_value!r} is a {type(clip_value).__name__}: need a number of at least 0"
        )
    if not float(clip_value) >= 0:
        raise ValueError(f"clip_value={clip_value!r}: need a number of at least 0")
    return float(clip_value)


def _check_finite(norm: Tensor, order: float, reason: str) -> None:
    """Raise RuntimeError, as torch does, for a norm that is the same on every rank."""
    if not math.isfinite(number := float(norm)):
        why = reason or "it leaves the range of its type"
        raise RuntimeError(
            f"the gradients' norm of order {order:g} is {number}, and error_if_nonfinite is set ({why}): "
            "nothing was clipped; call sync.step, which skips this step on every rank, or sync.abandon()"
        )
