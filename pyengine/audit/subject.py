"""What is audited: a parameter, a buffer, an optimizer's own copy, and where its bits are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyengine.gradients.slots import local
from pyengine.ops.device import runs_ahead


@dataclass(frozen=True)
class Shard:
    """Which elements of a parameter are on this rank: a range of them, in their order.

    Attributes:
        start: of the first one.
        numel: of the whole parameter.
        copies: ranks that hold the same ones, of those over which its gradient is summed.
    """

    start: int
    numel: int
    copies: int


@dataclass(frozen=True)
class Subject:
    """One tensor that ranks have to agree on.

    Attributes:
        name: in the model.
        tensor: a parameter or buffer.
        replicas: index of the group of ranks that have to hold the same; None where no other rank has it.
        summed: index of the group over whose ranks its gradient is summed; None: it is not looked for.
        shard: what this rank holds of it.
        kind: what it is, in a word.
    """

    name: str
    tensor: Tensor
    replicas: int | None
    summed: int | None
    shard: Shard
    kind: str = "parameter"

    def gradient(self) -> Tensor | None:
        """Return the reduced gradient that this rank holds; Megatron's is in `main_grad`."""
        found: Any = self.tensor.grad
        if found is None:
            found = getattr(self.tensor, "main_grad", None)
        return None if found is None else local(found)


def states_of(state: Mapping[Any, Any]) -> tuple[list[Tensor], list[float]]:
    """Return what an optimizer keeps for a parameter: tensors, and numbers on the host."""
    tensors, numbers = [], []
    for key in sorted(state, key=str):
        value = state[key]
        if isinstance(value, Tensor) and (value.numel() != 1 or runs_ahead(value.device)):
            tensors.append(value)
        elif isinstance(value, int | float | Tensor):
            numbers.append(float(value))
    return tensors, numbers
