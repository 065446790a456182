"""What an engine holds at a micro-batch, as plain data, and how the snapshots of several ranks become one.

A window's sums are cut by parameter and its micro-batches named by their places, so a snapshot knows nothing of buckets.
Exact sums merge: snapshots of any ranks of one window may be loaded by any number of ranks, each by one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._exact import ExactSum
from pyengine._exact_reference import BLOCK
from pyengine._ops import BucketPlan
from pyengine.accumulator.base import Saved, dense_strides

VERSION = 1


@dataclass(frozen=True)
class Identity:
    """What has to be equal for a snapshot to fit an engine.

    Attributes:
        accumulator: "native", "fp32" or "exact".
        terms: micro-batches of a full window over all ranks, where an exact sum's grid depends on it; else None.
        batch_norms: modules whose running statistics are replayed.
        params: name, shape, strides and dtype of every parameter.
    """

    accumulator: str
    terms: int | None
    batch_norms: int
    params: list[tuple[str, list[int], list[int], str]]


@dataclass
class Snapshot:
    """One rank's part of a run, between two micro-batches.

    Attributes:
        window: windows completed.
        steps: optimizer steps that changed parameters.
        rank, world_size: whose part it is.
        identity: what it fits.
        accumulate: micro-batches a full window, on that rank.
        is_between_loops: whether it was taken after a loop over `windows` had run out.
        order: of the buckets; see `Reducer.order`.
        places: indices, in the window over all ranks, of the micro-batches in `sums`.
        counts, losses: theirs.
        sums: see `Saved`.
        batch_norm: rows of running statistics, one a micro-batch.
        carry: gradients kept from the window before, by name.
        scaler: state of the loss scaler; empty without one.
        rng: states of the random generators, by name.
    """

    window: int
    steps: int
    rank: int
    world_size: int
    identity: Identity
    accumulate: int = 1
    is_between_loops: bool = False
    order: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sums: Saved = field(default_factory=dict)
    batch_norm: list[Tensor] = field(default_factory=list)
    carry: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain values, which `torch.load` reads with `weights_only=True`."""
        return {"version": VERSION, **vars(self), "identity": dict(vars(self.identity))}

    @classmethod
    def from_dict(cls, state: Any) -> Snapshot:
        """Read what `to_dict` returned."""
        need = f"need what sync.state_dict() returned, version {VERSION}"
        version = state.get("version") if isinstance(state, dict) else f"of a {type(state).__name__}"
        if version != VERSION:
            raise ValueError(f"state is version {version}: {need}")
        try:
            values = {f.name: state[f.name] for f in fields(cls)}
            values["identity"] = Identity(**state["identity"])
            values["identity"].params[:] = [tuple(param) for param in values["identity"].params]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is not whole ({error!r}): {need}") from None
        return cls(**values)

    def misshapen(self) -> str:
        """Say what of its parts does not fit together; empty if all does."""
        done = len(self.places)
        flags = [len(parts["nonfinite"]) for parts in self.sums.values() if "nonfinite" in parts]
        if {len(self.counts), len(self.losses), *flags, *map(len, self.batch_norm)} - {done}:
            return f"state of rank {self.rank} of {self.world_size} has parts of other numbers of micro-batches than {done}"
        return ""


def identify(
    accumulator: str,
    terms: int | None,
    batch_norms: int,
    names: Sequence[str],
    params: Sequence[Parameter],
) -> Identity:
    """Describe an engine, as it was made."""
    described = [
        (name, list(p.shape), list(dense_strides(p)), str(p.dtype).removeprefix("torch."))
        for name, p in zip(names, params, strict=True)
        if p.requires_grad
    ]
    return Identity(accumulator, terms, batch_norms, described)


def problems(snapshots: Sequence[Snapshot], identity: Identity) -> list[str]:
    """Say why snapshots cannot be parts of one window of this engine."""
    if not snapshots:
        return ["states: got none; pass this rank's state, or those of all ranks"]
    found = [_misfit(s, identity) or s.misshapen() for s in snapshots]
    positions = sorted({(s.window, s.steps) for s in snapshots})
    if len(positions) > 1:
        listed = ", ".join(f"{window} windows and {steps} steps" for window, steps in positions)
        found.append(
            f"states are of different windows ({listed}): keep those whose state['window'] is that of the parameters"
        )
    return [text for text in found if text]


def _misfit(snapshot: Snapshot, identity: Identity) -> str:
    theirs = snapshot.identity
    if (theirs.accumulator, theirs.terms) != (identity.accumulator, identity.terms):
        return (
            f"state of accumulator={theirs.accumulator!r} with {theirs.terms or 'any'} micro-batches a window, this is "
            f"accumulator={identity.accumulator!r} with {identity.terms or 'any'}: make the engine as it was "
            "(pe.Exact(micro_batches=...) keeps the window on any world size)"
        )
    if theirs.batch_norms != identity.batch_norms:
        return (
            f"state replays {theirs.batch_norms} BatchNorms, this engine {identity.batch_norms}: make the engine from the "
            "module, not from its parameters, both times or neither"
        )
    pairs = zip(theirs.params, identity.params, strict=False)
    changed = next((f"{a} in the state, {b} here" for a, b in pairs if a != b), "")
    if not changed and len(theirs.params) != len(identity.params):
        changed = f"{len(theirs.params)} in the state, {len(identity.params)} here"
    return f"parameters differ: {changed}" if changed else ""


def in_order(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return them in an order that every rank finds, the largest first."""
    return sorted(snapshots, key=lambda s: (-len(s.places), s.places, s.world_size, s.rank))


def disjoint(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return those with micro-batches, without the ones that share some with a larger one.

    A rank that goes on from others' snapshots holds their micro-batches in its own. Whatever is left out is computed
    again, so any choice is right; this one does not depend on the order of the list.
    """
    kept: list[Snapshot] = []
    for snapshot in in_order(snapshots):
        if snapshot.places and not any(set(snapshot.places) & set(other.places) for other in kept):
            kept.append(snapshot)
    return kept


def merge(snapshots: Sequence[Snapshot], about: Snapshot, device: torch.device) -> Snapshot:
    """Return the parts of one window as one part.

    Args:
        snapshots: none, one, or several of exact sums; `problems` has found nothing.
        about: whose position, carried gradients and so on to take.
        device: where sums are to lie.
    """
    whole = replace(about, places=[], counts=[], losses=[], sums={}, batch_norm=[])
    for snapshot in snapshots:
        whole.places += snapshot.places
        whole.counts += snapshot.counts
        whole.losses += snapshot.losses
    rows = [s.batch_norm for s in snapshots if s.batch_norm]
    whole.batch_norm = [torch.cat([part.to(device) for part in parts]) for parts in zip(*rows, strict=True)]
    names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.sums)
    whole.sums = {name: _merge_sums(name, snapshots, device) for name in names}
    whole.carry = {name: grad.to(device) for name, grad in about.carry.items()}
    return whole


def _merge_sums(name: str, snapshots: Sequence[Snapshot], device: torch.device) -> dict[str, Tensor]:
    everybody = [{part: t.to(device) for part, t in s.sums.get(name, {}).items()} for s in snapshots]
    if len(everybody) == 1:
        return everybody[0]
    terms = snapshots[0].identity.terms
    assert terms is not None
    total, *others = (_exact(parts, terms) for parts in everybody if parts)
    for other in others:
        total.merge_(other)
    flags = [
        parts.get("nonfinite", torch.zeros(len(s.places), dtype=torch.uint8, device=device))
        for s, parts in zip(snapshots, everybody, strict=True)
    ]
    numel = next(parts["bins"].numel() * BLOCK for parts in everybody if parts)
    return {**total.parts(0, numel), "nonfinite": torch.cat(flags)}


def _exact(parts: dict[str, Tensor], terms: int) -> ExactSum:
    blocks = parts["bins"].numel()
    numel = max(1, blocks) * BLOCK
    total = ExactSum(BucketPlan([0], [numel]), numel=numel, terms=terms, device=parts["limbs"].device)
    for name, part in total.parts(0, blocks * BLOCK).items():
        part.copy_(parts[name])
    return total
