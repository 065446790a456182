"""What has to be alike on every rank, and is compared with a header: engine, loss scale, the last steps.

Ranks that run different engines' windows, scale or clip by different factors, or step with different learning
rates would diverge in silence. Here all of that is one number of 60 bits, which the header contains.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead

# A header compares whole numbers by their sum and sum of squares in float64, which is exact up to 2^53: for
# numbers of 20 bits over 8192 ranks.
PIECE_BITS = 20
NUM_PIECES = 3
_PIECE = 2**PIECE_BITS
# modulus and factor of a rolling hash that stays below 2^53, where float64 is exact
_WORD, _FACTOR = 2.0**32, 1000003.0


@dataclass(frozen=True)
class OptimizerStep:
    """One call of an optimizer's step."""

    name: str  # of its class
    params: tuple[tuple[int, ...], ...]  # by group, the registration indices of the engine's parameters
    numbers: tuple[tuple[str, float | str], ...]  # its groups' hyperparameters, one after the other

    def __str__(self) -> str:
        values: dict[str, dict[str, None]] = {}  # by name the values of all groups, each once
        for name, value in self.numbers:
            values.setdefault(name, {})[value if isinstance(value, str) else f"{value:g}"] = None
        numbers = ", ".join(f"{name}={'/'.join(each)}" for name, each in values.items())
        indices = [index for group in self.params for index in group]
        first = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        return f"{self.name}({numbers}) of {len(indices)} parameters (number {first})"


@dataclass
class Use:
    """What this rank has done with the gradients of a window that was reduced."""

    steps: list[OptimizerStep] = field(default_factory=list)  # in order
    # What multiplied the sum of the gradients in each of them, and hyperparameters that are tensors on an
    # accelerator: 0-dim, on the host or on a device, unread.
    factors: list[Tensor] = field(default_factory=list)
    is_handed_over: bool = False  # whether its gradients are the caller's, by `unscale_`

    @property
    def is_callers_own(self) -> bool:
        """Whether the caller alone has used them, as far as is known."""
        return self.is_handed_over and not self.steps


@dataclass(frozen=True)
class HeaderDigest:
    """What a header says that all ranks have to have alike, as one number."""

    stage: str  # what the header is for
    engine: str  # which one, with the identity that its ranks agreed on when it was made
    scaler: str = ""  # settings of its loss scaler; empty without one
    scale: Tensor | None = None  # of the window's losses, 0-dim; None where it cannot be read, too
    use: Use = field(default_factory=Use)  # of the window before, if it was used
    accumulate: int = 0  # on this rank; ranks need not have it alike: for reports
    kept: tuple[int, ...] = ()  # parameters whose gradients of windows before count into this one

    def pieces(self) -> list[int]:
        """Return the number, in pieces of 20 bits, without what is on an accelerator; see `add_to`."""
        steps = [(step.name, _described(step.params), step.numbers) for step in self.use.steps]
        use = steps, len(self.use.factors), self.use.is_callers_own
        text = repr((self.stage, self.engine, self.scaler, use, self.kept)).encode()
        here = [struct.pack("<f", float(scalar)) for scalar in self._scalars if not _is_on_device(scalar)]
        digest = int.from_bytes(hashlib.blake2b(text + b"".join(here), digest_size=8).digest(), "little")
        return [digest >> PIECE_BITS * index & _PIECE - 1 for index in range(NUM_PIECES)]

    def add_to(self, lanes: Tensor) -> None:
        """Add what is on an accelerator, unread, to the pieces, each with its square: float64 `[pieces * 2]`.

        The pieces still have 20 bits.
        """
        far = [scalar for scalar in self._scalars if _is_on_device(scalar)]
        if not far:
            return
        pieces = lanes[::2]
        bits = torch.stack([scalar.to(pieces.device).float().reshape(()) for scalar in far]).view(torch.int32)
        total = pieces.new_zeros(())
        for word in bits.double():
            total = torch.remainder(total * _FACTOR + word, _WORD)
        pieces[0] = torch.remainder(pieces[0] + total, _PIECE)
        pieces[1] = torch.remainder(pieces[1] + torch.floor(total / _PIECE), _PIECE)
        lanes[1::2] = pieces * pieces

    def describe(self) -> dict[str, str]:
        """Describe everything, by the message that applies. Reads devices: for error reports only."""
        scale = "no loss scale" if self.scale is None else f"a loss scale of {float(self.scale):g}"
        factors = ", ".join(f"{float(factor):g}" for factor in self.use.factors)
        none = "the caller's own, by unscale_" if self.use.is_callers_own else "no step"
        steps = "; ".join(map(str, self.use.steps)) or none
        return {
            "engine": self.engine,
            "stage": self.stage,
            "scaler": f"{scale} ({self.scaler})" if self.scaler else scale,
            "use": f"{steps}, factors {factors}" if factors else steps,
            "kept": f"those of {len(self.kept)} parameters {list(self.kept[:8])}" if self.kept else "none",
        }

    @cached_property
    def _scalars(self) -> list[Tensor]:
        return [*self.use.factors] if self.scale is None else [self.scale, *self.use.factors]


def difference(described: Sequence[dict[str, str]]) -> str:
    """Describe in what the ranks differ, and the remedy, from `HeaderDigest.describe` of each rank."""
    for part, (what, remedy) in _PARTS.items():
        texts = [digest[part] for digest in described]
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"{what}: {listed}. {remedy}"
    return "ranks differ in a value whose description is the same on all: restore all from one checkpoint"


_PARTS = {
    "engine": (
        "ranks have sent windows of different engines",
        (
            "Call the engines in the same order on every rank. Nothing was stepped; call sync.abandon() on "
            "all of them and go on"
        ),
    ),
    "stage": (
        "ranks are at different points of their loops",
        (
            "Let every rank leave its loop over sync.windows where the others do. Restore all ranks from one "
            "checkpoint"
        ),
    ),
    "scaler": (
        "ranks have different loss scales",
        "Give sync.scaler the same arguments and state on every rank. Nothing was stepped",
    ),
    "use": (
        "ranks have used the last window differently",
        (
            "Clip, step and set the learning rate alike on every rank. Parameters have parted: restore all "
            "from one checkpoint"
        ),
    ),
    "kept": (
        "ranks keep different gradients of the window before, which no optimizer has used",
        (
            "Clear .grad of the same parameters on every rank. Nothing was stepped; call sync.abandon() on "
            "all of them and go on"
        ),
    ),
}


@lru_cache(maxsize=64)
def _described(params: tuple[tuple[int, ...], ...]) -> str:
    """Return `repr(params)`: the same ones in every window, and often a thousand."""
    return repr(params)


def _is_on_device(scalar: Tensor) -> bool:
    return runs_ahead(scalar.device)
