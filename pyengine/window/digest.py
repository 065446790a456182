"""The digest in a header, which checks that all ranks have the same engine, loss scale and last steps.

Ranks would silently diverge if they ran windows of different engines, used different loss scales or clipping
factors, or stepped with different learning rates. The digest combines all of these into one 60-bit number.
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

# A header compares integers by their sum and sum of squares in float64, which is exact up to 2^53. The digest
# therefore consists of 20-bit integers, which can be summed over up to 8192 ranks.
PIECE_BITS = 20
NUM_PIECES = 3
_PIECE = 2**PIECE_BITS
# The modulus and factor of a rolling hash whose values stay below 2^53, where float64 is exact.
_WORD, _FACTOR = 2.0**32, 1000003.0


@dataclass(frozen=True)
class OptimizerStep:
    """A description of one optimizer step."""

    name: str  # Class name of the optimizer.
    params: tuple[tuple[int, ...], ...]  # Per group, the registration indices of its parameters.
    numbers: tuple[tuple[str, float | str], ...]  # Hyperparameters of all groups, in order.

    def __str__(self) -> str:
        values: dict[str, dict[str, None]] = {}  # distinct values of all groups, by name
        for name, value in self.numbers:
            values.setdefault(name, {})[value if isinstance(value, str) else f"{value:g}"] = None
        numbers = ", ".join(f"{name}={'/'.join(each)}" for name, each in values.items())
        indices = [index for group in self.params for index in group]
        first = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        return f"{self.name}({numbers}) of {len(indices)} parameters (number {first})"


@dataclass
class Use:
    """How this rank has used the gradients of a reduced window."""

    steps: list[OptimizerStep] = field(default_factory=list)  # Optimizer steps, in order.
    # The factor by which gradients were multiplied in each step, and hyperparameters on an accelerator.
    # These values are 0-dim tensors on the host or on a device, and have not been read yet.
    factors: list[Tensor] = field(default_factory=list)
    is_handed_over: bool = False  # whether `unscale_` gave the gradients to the caller

    @property
    def is_callers_own(self) -> bool:
        """Whether only the caller, not an optimizer, has used the gradients."""
        return self.is_handed_over and not self.steps


@dataclass(frozen=True)
class HeaderDigest:
    """The values in a header that must be equal on every rank, combined into one number."""

    stage: str  # Purpose of the header.
    engine: str  # Description of the engine, and the identity assigned at its creation.
    scaler: str = ""  # Settings of the loss scaler; empty without one.
    scale: Tensor | None = None  # Loss scale (0-dim); None without a scaler or if the scale cannot be read.
    use: Use = field(default_factory=Use)  # Use of the previous window's gradients.
    accumulate: int = 0  # Value on this rank, only for error messages; it may differ between ranks.
    micro_batches: int = 0  # Number of micro-batches in a full window, over all ranks.
    kept: tuple[int, ...] = ()  # Parameters with gradients from earlier windows.

    def pieces(self) -> list[int]:
        """Return the digest, except for values on an accelerator, as 20-bit integers; see `add_to`."""
        steps = [(step.name, _described(step.params), step.numbers) for step in self.use.steps]
        use = steps, len(self.use.factors), self.use.is_callers_own
        text = repr((self.stage, self.engine, self.scaler, use, self.micro_batches, self.kept)).encode()
        here = [struct.pack("<f", float(scalar)) for scalar in self._scalars if not _is_on_device(scalar)]
        digest = int.from_bytes(hashlib.blake2b(text + b"".join(here), digest_size=8).digest(), "little")
        return [digest >> PIECE_BITS * index & _PIECE - 1 for index in range(NUM_PIECES)]

    def add_to(self, lanes: Tensor) -> None:
        """Add values on an accelerator to the digest, without reading them on the host.

        Args:
            lanes: float64 `[pieces * 2]`, each integer followed by its square. The integers still have 20
                bits afterwards.
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
        """Describe each part for an error message, with the keys of `_PARTS`; waits for device values."""
        scale = "no loss scale" if self.scale is None else f"a loss scale of {float(self.scale):g}"
        factors = ", ".join(f"{float(factor):g}" for factor in self.use.factors)
        none = "sync.unscale_() without sync.step()" if self.use.is_callers_own else "no step"
        steps = "; ".join(map(str, self.use.steps)) or none
        return {
            "engine": self.engine,
            "stage": self.stage,
            "scaler": f"{scale} ({self.scaler})" if self.scaler else scale,
            "use": f"{steps}, factors {factors}" if factors else steps,
            "length": f"{self.micro_batches} micro-batches over all ranks",
            "kept": f"those of {len(self.kept)} parameters {list(self.kept[:8])}" if self.kept else "none",
        }

    @cached_property
    def _scalars(self) -> list[Tensor]:
        return [*self.use.factors] if self.scale is None else [self.scale, *self.use.factors]


def difference(described: Sequence[dict[str, str]]) -> str:
    """Describe how ranks differ, with a remedy, from the result of `HeaderDigest.describe` on each rank."""
    for part, (what, remedy) in _PARTS.items():
        texts = [digest[part] for digest in described]
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"{what}: {listed}. {remedy}"
    return (
        "ranks differ in a value whose description is the same on all ranks: restore all ranks from one "
        "checkpoint"
    )


_PARTS = {
    "engine": (
        "ranks have sent windows of different engines",
        (
            "Call the engines in the same order on every rank. No optimizer has stepped; call "
            "sync.abandon() on all ranks and continue"
        ),
    ),
    "stage": (
        "ranks are at different points of their loops",
        (
            "Make these calls on every rank or on none, and leave the loop over sync.windows at the same "
            "point on every rank. Restore all ranks from one checkpoint"
        ),
    ),
    "scaler": (
        "ranks have different loss scales",
        "Give sync.scaler the same arguments and state on every rank. No optimizer has stepped",
    ),
    "use": (
        "ranks have used the last window differently",
        (
            "Clip, step and set the learning rate in the same way on every rank. Parameters now differ: "
            "restore all ranks from one checkpoint"
        ),
    ),
    "length": (
        "ranks have full windows of different lengths",
        (
            "Set sync.gradient_accumulation_steps to the same number on every rank. No optimizer has "
            "stepped; call sync.abandon() on all ranks and continue"
        ),
    ),
    "kept": (
        "ranks keep different gradients of the previous window, which no optimizer has used",
        (
            "Clear .grad of the same parameters on every rank. No optimizer has stepped; call "
            "sync.abandon() on all ranks and continue"
        ),
    ),
}


@lru_cache(maxsize=64)
def _described(params: tuple[tuple[int, ...], ...]) -> str:
    """Return `repr(params)`, cached because the parameters rarely change and may be numerous."""
    return repr(params)


def _is_on_device(scalar: Tensor) -> bool:
    return runs_ahead(scalar.device)
