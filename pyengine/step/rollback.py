"""Optimizer steps that can be rolled back on the device.

Rollback is for optimizers that cannot skip a step, and for devices whose values the host does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adadelta, Optimizer

from pyengine.window.final_pass import FinalPass

_LET_THE_HOST_READ = (
    "make the engine with nonfinite='raise', so that the host reads the outcome of every window, or use "
    "another optimizer"
)
_ON_THE_HOST = "on the host, where a step that the device skips cannot be undone"


class RollbackStepper:
    """Steps any optimizer, then restores the old values of parameters and state if necessary.

    In a window that must not be used, all parameters are restored. In any window, a parameter that no rank
    used is also restored, because its gradient is zeros instead of None. State that a skipped step has
    created is removed; therefore the host waits for the outcome in the first step of a parameter without
    state, and in a later step that creates or replaces state. A step frees the gradients of the optimizer's
    parameters.

    Args:
        index: maps `id(parameter)` to the parameter's index in `FinalPass.used`; other parameters have no
            gradient.
        always_waits: whether the host waits for the outcome in every step, so that no rollback is needed.

    Cost: a step that can be rolled back copies the parameters and their state before the step, and reads and
    writes both once more after the step.
    """

    def __init__(self, index: Mapping[int, int], *, always_waits: bool) -> None:
        self._index, self._always_waits = index, always_waits
        self._met: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()

    def needs_host(self, optimizer: Optimizer) -> bool:
        met = self._met.get(optimizer, set())
        return self._always_waits or any(
            id(param) not in met and not optimizer.state.get(param) for param in self._mine(optimizer)
        )

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        mine = list(self._mine(optimizer))
        if any(param.grad is None for param in mine):
            raise RuntimeError(
                f"a parameter of this {type(optimizer).__name__} has no gradient anymore, because a step on "
                "this device consumes gradients. Use one optimizer per parameter, and leave zero_grad to the "
                "engine"
            )
        if self.needs_host(optimizer):
            self._step_knowing(optimizer, mine, final)
        else:
            self._step_and_take_back(optimizer, mine, final)
        for param in mine:
            param.grad = None

    def _mine(self, optimizer: Optimizer) -> Iterator[Parameter]:
        for group in optimizer.param_groups:
            yield from (param for param in group["params"] if id(param) in self._index)

    def _step_knowing(self, optimizer: Optimizer, mine: list[Parameter], final: FinalPass) -> None:
        """Step when the host knows the outcome, so that unused parameters get no state."""
        if bool(final.found_inf):
            return
        assert final.used is not None
        used = final.used.tolist()
        for param in mine:
            if not used[self._index[id(param)]]:
                param.grad = None
        self._step(optimizer, [param for param in mine if param.grad is not None])

    @torch.no_grad()
    def _step_and_take_back(self, optimizer: Optimizer, mine: list[Parameter], final: FinalPass) -> None:
        assert final.used is not None
        is_good = (final.found_inf == 0) & final.used
        before = {param: dict(optimizer.state.get(param, {})) for param in mine}
        old = {
            param: [tensor.clone() for tensor in _tensors(param, state)] for param, state in before.items()
        }
        self._step(optimizer, mine)
        changed = []
        for param, state in before.items():
            keeps_new = is_good[self._index[id(param)]]
            for tensor, kept in zip(_tensors(param, state), old[param], strict=True):
                torch.where(keeps_new, tensor, kept, out=tensor)
            now = optimizer.state.get(param, {})
            if now.keys() != state.keys() or any(now[key] is not value for key, value in state.items()):
                changed.append(param)
        flags = is_good.tolist() if changed else []
        for param in changed:
            if flags[self._index[id(param)]]:
                continue
            if before[param]:
                optimizer.state[param] = before[param]
            else:
                del optimizer.state[param]

    def _step(self, optimizer: Optimizer, params: list[Parameter]) -> None:
        """Step, and check once per parameter that the step changes nothing on the host."""
        met = self._met.setdefault(optimizer, set())
        new = [param for param in params if id(param) not in met]
        if not new or self._always_waits:
            optimizer.step()
            return
        _check_state(optimizer, new)
        numbers = _numbers(optimizer)
        optimizer.step()
        _check_state(optimizer, new)
        if _numbers(optimizer) != numbers:
            name = type(optimizer).__name__
            raise ValueError(f"{_LET_THE_HOST_READ}: {name} counts in its param_groups {_ON_THE_HOST}")
        met.update(map(id, new))


def _tensors(param: Parameter, state: Mapping[str, Any]) -> list[Tensor]:
    return [param, *(value for value in state.values() if isinstance(value, Tensor))]


def _check_state(optimizer: Optimizer, mine: list[Parameter]) -> None:
    """Raise ValueError if a step would change a value on the host."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    has_capturable = not isinstance(optimizer, Adadelta)  # torch rejects capturable=True on XLA
    if not has_capturable:
        raise ValueError(
            f"{_LET_THE_HOST_READ}: {name} counts its steps {_ON_THE_HOST}, and torch does not "
            "support capturable=True for this optimizer here"
        )
    if any(group.get("capturable") is False for group in groups):
        # On XLA devices torch has no fused steps, and rejects most foreach steps with capturable=True.
        others = [f", {key}=False" for key in ("foreach", "fused") if any(g.get(key) for g in groups)]
        raise ValueError(
            f"use {name}(..., capturable=True{''.join(others)}): with capturable=False {name} counts its "
            f"steps {_ON_THE_HOST}"
        )
    for param in mine:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device != param.device):
                raise ValueError(f"{_LET_THE_HOST_READ}: {name} keeps {key!r} {_ON_THE_HOST}")


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if isinstance(v, int | float)} for g in optimizer.param_groups]
