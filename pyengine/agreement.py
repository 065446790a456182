"""The handshake at construction: what ranks must have in common, and what is wrong on any of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyengine._exact import MAX_TERMS
from pyengine._pointers import DTYPE_CODES
from pyengine.accumulator import KINDS, Exact
from pyengine.layout import ParamSpec, first_difference
from pyengine.window import check_accumulate, share
from pyengine.wire import FP32, Wire

NONFINITE_POLICIES = ("skip", "raise")


@dataclass(frozen=True)
class Settings:
    """The arguments that `GradSync` and `attach` share."""

    accumulate: int
    wire: Wire
    accumulator: str | Exact
    nonfinite: str
    bucket_cap_mb: float = 25

    @property
    def kind(self) -> str:
        """The accumulator's name."""
        return "exact" if isinstance(self.accumulator, Exact) else self.accumulator

    def shared(self) -> str:
        """Describe what has to be equal on every rank (micro-batches a window need not be)."""
        return f"wire={self.wire}, accumulator={self.accumulator!r}, nonfinite={self.nonfinite!r}, " + (
            f"bucket_cap_mb={self.bucket_cap_mb}"
        )

    def problems(self) -> list[str]:
        """Say what is wrong with the values."""
        found = check_accumulate(self.accumulate)
        if isinstance(self.accumulator, Exact) and not isinstance(self.accumulator.micro_batches, int):
            found.append(f"accumulator={self.accumulator}: need a whole number of micro-batches")
        if self.kind not in KINDS:
            found.append(f"accumulator={self.accumulator!r}: need one of {', '.join(map(repr, KINDS))}")
        if self.nonfinite not in NONFINITE_POLICIES:
            found.append(
                f"nonfinite={self.nonfinite!r}: need one of {', '.join(map(repr, NONFINITE_POLICIES))}"
            )
        if self.kind == "exact" and self.wire != FP32():
            found.append(
                f"wire={self.wire}: need wire.FP32() with accumulator='exact', whose sums travel as integers of their own"
            )
        if not isinstance(self.bucket_cap_mb, int | float) or not self.bucket_cap_mb > 0:
            found.append(
                f"bucket_cap_mb={self.bucket_cap_mb!r}: need a size above 0, in MiB; 25 is a good start"
            )
        return found


def agree(comm: Any, specs: Sequence[ParamSpec], settings: Settings, problems: Sequence[str]) -> Shares:
    """Raise on every rank what any rank has to complain of, or in what ranks differ.

    Args:
        comm: transport.
        specs: this rank's parameters, in registration order.
        settings: this rank's arguments.
        problems: this rank's own complaints of the parameters.

    Returns:
        How a full window is dealt out.

    Raises:
        ValueError: names the rank and the argument, or the first parameter that differs and who has what.
    """
    problems = [*settings.problems(), *problems]
    everybody = comm.all_gather_object((problems, settings, list(specs)))
    complaints = [f"rank {rank}: {text}" for rank, (texts, *_) in enumerate(everybody) for text in texts]
    if complaints:
        alone = comm.world_size == 1
        raise ValueError("; ".join(problems) if alone else "; ".join(complaints))
    difference = first_difference([specs for _, _, specs in everybody])
    if difference is not None:
        raise ValueError(
            f"params_or_module differs between ranks: {difference}. Build the same model, in the same order, on every rank"
        )
    shared = [settings.shared() for _, settings, _ in everybody]
    if len(set(shared)) > 1:
        values = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(shared))
        raise ValueError(f"ranks have different settings: {values}. Pass the same ones on every rank")
    return _shares([settings for _, settings, _ in everybody])


@dataclass(frozen=True)
class Shares:
    """How a full window is dealt out.

    Attributes:
        places: by rank, the indices of its micro-batches in the window.
        terms: micro-batches over all ranks.
        by_rank: each rank's `accumulate`.
    """

    places: list[range]
    terms: int
    by_rank: list[int]

    @property
    def total(self) -> int:
        """Places that any rank may name."""
        return max(self.terms, sum(self.by_rank))

    @property
    def most(self) -> int:
        """Micro-batches that a rank may get, also in a window of which a part is done and the rest dealt out anew."""
        return max(*self.by_rank, -(-self.terms // len(self.by_rank)))


def _shares(everybody: Sequence[Settings]) -> Shares:
    first, by_rank = everybody[0], [settings.accumulate for settings in everybody]
    if isinstance(first.accumulator, Exact):
        terms, origin = first.accumulator.micro_batches, f"accumulator={first.accumulator}"
        if max(by_rank) > terms:
            raise ValueError(
                f"{origin} with accumulate={max(by_rank)}: need at least as many micro-batches in the window over all ranks "
                "as on one of them"
            )
    else:
        terms, origin = sum(by_rank), f"accumulate={by_rank} by rank"
    if first.kind == "exact" and not 1 <= terms <= MAX_TERMS:
        raise ValueError(
            f"{origin} makes {terms} micro-batches a window over all ranks: accumulator='exact' takes 1 to {MAX_TERMS}; "
            "make micro-batches larger or windows shorter"
        )
    return Shares(_places(by_rank, terms), terms, by_rank)


def _places(by_rank: Sequence[int], terms: int) -> list[range]:
    """Deal places out as `WindowSampler` does, if that is what the ranks' numbers come from; else one after the other."""
    world_size = len(by_rank)
    even = [share(terms, rank=rank, world_size=world_size) for rank in range(world_size)]
    if [max(1, len(places)) for places in even] == list(by_rank):
        return even
    ends = list(itertools.accumulate(by_rank, initial=0))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def problems_of(named: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Say which parameters no engine can take."""
    if not named:
        return ["params_or_module: got no parameter; pass a module or its parameters (a generator only once)"]
    devices = sorted({str(p.device) for _, p in named})
    found = []
    if not any(p.requires_grad for _, p in named):
        found.append(
            f"params_or_module: none of {len(named)} parameters requires a gradient; pass trainable ones"
        )
    if len(devices) > 1:
        found.append(
            f"params_or_module: parameters on {', '.join(devices)}; need one device an engine: make one each"
        )
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
    found += [
        f"parameter {name!r} is {p.dtype}: need one of {known}; convert it or freeze it"
        for name, p in named
        if p.requires_grad and p.dtype not in DTYPE_CODES
    ]
    return found


def sparse_modules(ddp: DistributedDataParallel) -> list[str]:
    """Say which modules would make DDP send sparse gradients."""
    return [
        f"{name or type(module).__name__} has sparse=True: DDP would give its gradient a bucket that no wire here can "
        "carry. Build it with sparse=False, or use pe.GradSync, which sums sparse gradients densely"
        for name, module in ddp.module.named_modules()
        if getattr(module, "sparse", False)
    ]
