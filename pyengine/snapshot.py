"""What an engine holds at a micro-batch, as plain data, and how the snapshots of several ranks become one.

A window's sums are cut by parameter and its micro-batches named by their places, so a snapshot knows nothing of buckets.
Exact sums merge: snapshots of any ranks of one window may be loaded by any number of ranks, each by one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pyengine._exact import ExactSum
from pyengine._exact_reference import BLOCK
from pyengine._ops import BucketPlan
from pyengine.accumulator.base import Saved

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
    order: dict[str, Any] = field(default_factory=dict)
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
        names = {f.name for f in fields(cls)}
        if not isinstance(state, dict) or state.get("version") != VERSION or not names <= state.keys():
            found = f"version {state.get('version')}" if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"state is {found}: need what sync.state_dict() returned, version {VERSION}")
        values = {name: state[name] for name in names}
        params = [tuple(param) for param in state["identity"]["params"]]
        return cls(**{**values, "identity": Identity(**{**state["identity"], "params": params})})


def problems(snapshots: Sequence[Snapshot], identity: Identity) -> list[str]:
    """Say why snapshots cannot be parts of one window of this engine."""
    if not snapshots:
        return ["states: got none; pass this rank's state, or those of all ranks"]
    found = [_misfit(snapshot, identity) for snapshot in snapshots]
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


def disjoint(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return those with micro-batches, without the ones that share some with a larger one.

    A rank that goes on from others' snapshots holds their micro-batches in its own. Whatever is left out is computed
    again, so any choice is right; this one does not depend on the order of the list.
    """
    kept: list[Snapshot] = []
    for snapshot in sorted(snapshots, key=lambda s: (-len(s.places), s.places)):
        if snapshot.places and not any(set(snapshot.places) & set(other.places) for other in kept):
            kept.append(snapshot)
    return kept


def merge(snapshots: Sequence[Snapshot], identity: Identity) -> Snapshot:
    """Return the parts of one window as one part.

    Args:
        snapshots: one, or several of exact sums; `problems` has found nothing.
        identity: of the engine.
    """
    first = snapshots[0]
    whole = Snapshot(first.window, first.steps, first.rank, first.world_size, identity, first.order)
    for snapshot in snapshots:
        whole.places += snapshot.places
        whole.counts += snapshot.counts
        whole.losses += snapshot.losses
    rows = [s.batch_norm for s in snapshots if s.batch_norm]
    whole.batch_norm = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.sums)
    whole.sums = {name: _merge_sums(name, snapshots, identity.terms) for name in names}
    return whole


def _merge_sums(name: str, snapshots: Sequence[Snapshot], terms: int | None) -> dict[str, Tensor]:
    with_it = [s.sums[name] for s in snapshots if name in s.sums]
    if len(with_it) == len(snapshots) == 1:
        return with_it[0]
    assert terms is not None
    total, *others = (_exact(parts, terms) for parts in with_it)
    for other in others:
        total.merge_(other)
    device = total.limbs.device
    flags = [
        s.sums[name]["nonfinite"].to(device)
        if name in s.sums
        else torch.zeros(len(s.places), dtype=torch.uint8, device=device)
        for s in snapshots
    ]
    numel = with_it[0]["bins"].numel() * BLOCK
    return {**total.parts(0, numel), "nonfinite": torch.cat(flags)}


def _exact(parts: dict[str, Tensor], terms: int) -> ExactSum:
    blocks = parts["bins"].numel()
    numel = max(1, blocks) * BLOCK
    total = ExactSum(BucketPlan([0], [numel]), numel=numel, terms=terms, device=parts["limbs"].device)
    for name, part in total.parts(0, blocks * BLOCK).items():
        part.copy_(parts[name])
    return total
