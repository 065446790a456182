"""Detection of writes to gradients and parameters by code outside the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.engine.kept_grads import KeptGrads
from pyengine.engine.parameters import TrainedParameters, WrittenParameters
from pyengine.gradients.base import Reducer
from pyengine.gradients.marks import REMEDY, GradMarks
from pyengine.gradients.published import Published
from pyengine.ops.device import is_lazy


class ForeignWrites:
    """Compares gradients and parameters with their state after the last write by the engine.

    Detects a bare backward, a `zero_grad`, an `optimizer.step()` or a write by a hook inside a window, and a
    model whose parameters were replaced. The methods return error texts, or an empty result; `Engine` decides
    whether to raise them.
    """

    def __init__(
        self, reducer: Reducer, module: nn.Module | None, published: Published, kept_grads: KeptGrads
    ) -> None:
        self._reducer, self._published, self._kept_grads = reducer, published, kept_grads
        self._is_lazy = is_lazy(reducer.params[0].device)
        self.marks = GradMarks(reducer, published)
        # Checks whether the model still trains the parameters of the engine.
        self.trained = TrainedParameters(reducer.names, reducer.params, module)
        # Detects writes to parameters inside a window by code outside the engine.
        self.written = WrittenParameters(reducer.params)
        # The version of a parameter (its number of writes) at the last backward outside the engine.
        self._bare_version: int | None = None
        self._has_warned = False

    def open_window(self) -> None:
        """Discard the findings of the previous window, so that they do not make this window fail."""
        self._bare_version = None
        self.written.forget()
        self.marks.release()

    def begin_window(self, refuse: Callable[[str, Tensor], object]) -> None:
        """Record gradients and parameters before the first backward; `refuse` is passed to `watch_hooks`."""
        self.marks.record()
        self.marks.watch_hooks(refuse)
        if not self._is_lazy:
            self.written.record()

    # ---- gradients ----

    def in_window(self) -> str:
        """Describe gradients that were written to since the previous micro-batch; empty if there are none."""
        changed = self.marks.changed()
        return self.marks.describe(changed, "between micro-batches") if changed else ""

    def replaced_in_window(self) -> list[str]:
        """Describe gradients that were replaced between micro-batches, which `in_window` cannot detect."""
        replaced = self._reducer.grad_record.replaced()
        return [self.marks.describe(replaced, "between micro-batches")] if replaced else []

    def between_windows(self) -> tuple[str, Tensor | None] | None:
        """Describe gradients that were written to between windows and that the next window would lose.

        Returns None, or an error text and an optional flag: a 0-dim bool tensor that is not read here. If the
        flag is False, all these gradients are zero. Zero gradients are allowed between windows, so the error
        does not apply.
        """
        if strays := self._reducer.grad_record.outside():
            return self.marks.describe(strays, "between windows"), None
        if self._is_lazy:
            return None
        # The user may change gradients that no optimizer has used; they are carried into this window.
        changed = [index for index in self._published.changed() if not self._kept_grads.keeps(index)]
        if not changed:
            return None
        flag = self.marks.any_nonzero(changed)
        return None if flag is None else (self.marks.describe(changed, "between windows"), flag)

    # ---- parameters ----

    def of_parameters(self) -> list[str]:
        """Describe parameters that were written to in the window, or that have a gradient but no engine."""
        found = []
        written = [index for index in self.written.written() if self._reducer.is_used(index)]
        if written:
            found.append(_written_text([self._reducer.names[index] for index in written]))
        if strangers := self.trained.strangers():
            found.append(_stranger_text(strangers))
        return found

    def notice_backward(self, param: Parameter, engine: str) -> None:
        """Warn once if a training loop does not use the engine.

        The loop counts as not using the engine if, between two backwards outside the engine, no window has
        opened and an optimizer has written to the parameter.
        """
        version, before = param._version, self._bare_version
        self._bare_version = version
        if before not in (None, version) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{REMEDY}; call sync.step(optimizer) in place of optimizer.step(): {engine} are trained "
                "without their engine, on gradients of this rank alone. (If this is intended, call "
                "sync.close())",
                stacklevel=3,
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"parameter {names[0]!r}{more}"


def _written_text(names: Sequence[str]) -> str:
    return (
        f"delete optimizer.step(), since sync.step already steps the optimizer: {_listed(names)} was written "
        "to inside the window, between its first backward and its step, and may differ between ranks now: "
        "load a checkpoint. "
        "(load_state_dict, averaged weights, a clamp or any other write must come after sync.step)"
    )


def _stranger_text(names: Sequence[str]) -> str:
    return (
        f"call sync.close() and make a new engine, or freeze {names[0]!r} again: {_listed(names)} was frozen "
        "or did not exist when the engine was made, and has a gradient that no engine reduces. (Or make the "
        "engine while all parameters are trainable, and freeze them afterwards)"
    )
