"""What an engine holds at a micro-batch, as plain data, and how the snapshots of several ranks become one.

A window's sums are cut by parameter and its micro-batches named by their places, so a snapshot knows nothing
of buckets. Exact sums merge: snapshots of any ranks of one window may be loaded by any number of ranks, each
by one of them.

As a state, a snapshot is `{"version", "window", "steps", "rank 0 of 2": (content, checksum)}`. The name of
the rank distinguishes ranks where equal names mean copies, and a tuple is what
torch.distributed.checkpoint saves and loads whole.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.checkpoint.checksum import checksum
from pyengine.gradients.slots import Saved, dense_strides
from pyengine.ops.exact import ExactSum
from pyengine.ops.exact_reference import BLOCK
from pyengine.ops.plan import BucketPlan

VERSION = 2
_FLAT = 1  # had all fields side by side, and no checksum
_POSITION = ("window", "steps")


@dataclass(frozen=True)
class Identity:
    """What has to be equal for a snapshot to fit an engine."""

    accumulator: str
    # Deposits of a full window over all ranks, where an exact sum's grid depends on it; else None.
    terms: int | None
    batch_norms: int  # modules whose running statistics are replayed
    params: list[tuple[str, list[int], list[int], str]]  # name, shape, strides and dtype
    run: int = 1  # micro-batches that make one deposit; saved where there are several

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "run" or value > 1}


@dataclass
class Snapshot:
    """One rank's part of a run, between two micro-batches."""

    window: int  # completed
    steps: int  # of optimizers, that changed parameters
    rank: int
    world_size: int
    identity: Identity
    accumulate: int = 1  # micro-batches of a full window, on that rank
    is_between_loops: bool = False  # made after a loop over `windows` had run out
    order: list[int] = field(default_factory=list)  # of the buckets; see `Reducer.order`
    # Of the micro-batches in `sums`: indices in the window over all ranks, counts, losses (None: not known),
    # and which had left the window, saved where any had.
    places: list[int] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)  # by loss; saved if counts were read ahead
    sums: Saved = field(default_factory=dict)
    batch_norm: list[Tensor] = field(default_factory=list)  # see `BatchNormReplay.save`
    # Gradients kept from the window before, by name: the parameter's shape and dtype.
    carry: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)  # empty without a loss scaler
    # What the wire has lost on this rank and is still to send, by name, float32 `[numel]` in the order in
    # which the parameter is stored; saved where there is any.
    residuals: dict[str, Tensor] = field(default_factory=dict)
    # What measures keep of earlier windows, by field of the `StepRecord`; saved where there is any.
    measured: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)  # states of the random generators, by name
    checksum: int = 0  # of a snapshot that was read, of all its other fields

    @property
    def owner(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain values, which `torch.load` reads with `weights_only=True`."""
        kept = [name for name in _CONTENT if name not in _OPTIONAL or getattr(self, name)]
        content = {name: getattr(self, name) for name in kept}
        content["identity"] = self.identity.to_dict()
        position = {name: content[name] for name in _POSITION}
        return {"version": VERSION, **position, self.owner: (content, checksum(content))}

    @classmethod
    def read(cls, state: Any, *, largest: int | None = None) -> list[Snapshot]:
        """Read what `to_dict` returned, or several of it with the parts of several ranks in one."""
        if not isinstance(state, dict):
            raise ValueError(f"state is a {type(state).__name__}: {_NEED}")  # noqa: TRY004 - of a file
        version = state.get("version")
        if version == _FLAT:
            content = {name: value for name, value in state.items() if name != "version"}
            return [_of(content, _checksum(content, largest))]
        if version != VERSION:
            raise ValueError(f"state is version {version!r}: {_NEED}")
        parts = {name: part for name, part in state.items() if name not in ("version", *_POSITION)}
        if not parts:
            raise ValueError(f"state is not whole (no rank's part): {_NEED}")
        return [_part(state, owner, part, largest) for owner, part in parts.items()]


_CONTENT = [f.name for f in fields(Snapshot) if f.name != "checksum"]
_OPTIONAL = {"dropped", "totals", "residuals", "measured"}
_NEED = f"need what sync.state_dict() returned, version {VERSION} or {_FLAT}"


def _part(state: dict[str, Any], owner: str, part: Any, largest: int | None) -> Snapshot:
    """Read the part of one rank, if nothing has changed it."""
    if not (isinstance(part, tuple | list) and len(part) == 2 and isinstance(part[0], dict)):
        raise ValueError(
            f"state has {owner!r}, a {type(part).__name__}: {_NEED}, and keep what is yours beside it"
        )
    content, saved = part
    owner = owner if str(owner).isprintable() else repr(owner)  # it may come from anywhere, and is printed
    found = _checksum(content, largest)
    if found != saved:
        raise ValueError(
            f"state of {owner} was damaged or changed after it was saved (its checksum was {saved!r}, and is "
            f"{found}): go on from another one"
        )
    snapshot = _of(content, found)
    here = (snapshot.owner, *(getattr(snapshot, name) for name in _POSITION))
    outside = (owner, *(state.get(name) for name in _POSITION))
    if here != outside:
        raise ValueError(
            f"state was damaged or changed after it was saved: (rank, windows, steps) are {outside}, and "
            f"{here} in its part; go on from another one"
        )
    return snapshot


def _checksum(content: dict[str, Any], largest: int | None) -> int:
    try:
        return checksum(content, largest=largest)
    except TypeError as error:
        raise ValueError(f"state is not whole ({error}): {_NEED}") from None


def _of(content: dict[str, Any], found: int) -> Snapshot:
    """Make a snapshot of its content, if every field is of its kind."""
    content = dict(content)
    content.pop("factors", None)  # of 0.1.0's PowerSGD, which nothing reads any more; its residuals load
    differ = sorted(set(_CONTENT) ^ (content.keys() | _OPTIONAL), key=str)
    if differ:
        what = ", ".join(f"{name!r} {'is too much' if name in content else 'is missing'}" for name in differ)
        raise ValueError(f"state is not whole ({what}): {_NEED}")
    wrong = [
        f"state has {name}={reprlib.repr(content[name])}, need {need}"
        for name, (is_one, need) in _KINDS.items()
        if name in content and not is_one(content[name])
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    params = [(name, shape, strides, dtype) for name, shape, strides, dtype in content["identity"]["params"]]
    identity = Identity(**{**content["identity"], "params": params})
    return Snapshot(**{**content, "identity": identity}, checksum=found)


def identify(
    accumulator: str,
    terms: int,
    run: int,
    batch_norms: int,
    names: Sequence[str],
    params: Sequence[Parameter],
) -> Identity:
    described = [
        (name, list(p.shape), list(dense_strides(p)), str(p.dtype).removeprefix("torch."))
        for name, p in zip(names, params, strict=True)
        if p.requires_grad
    ]
    return Identity(accumulator, terms if accumulator == "exact" else None, batch_norms, described, run)


def in_order(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return them in an order that every rank finds, the largest first."""
    return sorted(snapshots, key=lambda s: (-len(s.places), s.places, s.world_size, s.rank, s.checksum))


def disjoint(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return those with micro-batches, without the ones that share some with a larger one.

    A rank that continues from other ranks' snapshots holds their micro-batches in its own. Whatever is left
    out is computed again, so any choice is right; this one does not depend on the order of the list.
    """
    kept: list[Snapshot] = []
    for snapshot in in_order(snapshots):
        if snapshot.places and not any(set(snapshot.places) & set(other.places) for other in kept):
            kept.append(snapshot)
    return kept


def merge(snapshots: Sequence[Snapshot], about: Snapshot, device: torch.device) -> Snapshot:
    """Return the parts of one window, one or several of exact sums, as one part, with the rest of `about`.

    Its lists are its own; `carry` is copied, other tensors only where they are concatenated or on another
    device, so they may be the snapshots' own.
    """
    whole = replace(about, places=[], counts=[], losses=[], dropped=[], sums={}, batch_norm=[])
    for snapshot in snapshots:
        whole.places += snapshot.places
        whole.counts += snapshot.counts
        whole.losses += snapshot.losses
        whole.dropped += snapshot.dropped or [False] * len(snapshot.places)
    rows = [s.batch_norm for s in snapshots if s.batch_norm]
    whole.batch_norm = [
        torch.cat([part.detach().to(device) for part in parts]) for parts in zip(*rows, strict=True)
    ]
    names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.sums)
    whole.sums = {name: _merge_sums(name, snapshots, device) for name in names}
    # Copies: they become `.grad` of parameters, and the state may be loaded again.
    whole.carry = {name: grad.detach().to(device, copy=True) for name, grad in about.carry.items()}
    return whole


def share_residuals(
    snapshots: Sequence[Snapshot], *, rank: int, world_size: int, device: torch.device
) -> dict[str, Tensor]:
    """Return one rank's share of the residuals, float32 `[numel]` by parameter, the caller's: each rank of
    the snapshots gives its own to one of the ranks there are now, so that their sum is what it was.
    """
    shared: dict[str, Tensor] = {}
    for snapshot in sorted(snapshots, key=lambda s: s.rank):
        if snapshot.rank % world_size == rank:
            for name, part in snapshot.residuals.items():
                mine = part.detach().to(device)
                shared[name] = shared[name] + mine if name in shared else mine.clone()
    return shared


def _merge_sums(name: str, snapshots: Sequence[Snapshot], device: torch.device) -> dict[str, Tensor]:
    sums = [{part: t.detach().to(device) for part, t in s.sums.get(name, {}).items()} for s in snapshots]
    flags = [
        parts.get("nonfinite", torch.zeros(len(s.places), dtype=torch.uint8, device=device))
        for s, parts in zip(snapshots, sums, strict=True)
    ]
    if len(sums) == 1:
        return {**sums[0], "nonfinite": flags[0]}
    terms = snapshots[0].identity.terms
    assert terms is not None
    total, *others = (_exact(parts, terms) for parts in sums if parts)
    for other in others:
        total.merge_(other)
    numel = next(parts["bins"].numel() * BLOCK for parts in sums if parts)
    return {**total.slot_state(0, numel), "nonfinite": torch.cat(flags)}


def _exact(parts: dict[str, Tensor], terms: int) -> ExactSum:
    blocks = parts["bins"].numel()
    numel = max(1, blocks) * BLOCK
    total = ExactSum(BucketPlan([0], [numel]), numel=numel, terms=terms, device=parts["limbs"].device)
    for name, part in total.slot_state(0, blocks * BLOCK).items():
        part.copy_(parts[name])
    return total


# ---- what kind of value every field has, whatever engine it belongs to ----


def is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return type(value) is list and all(map(is_one, value))


def _is_dict_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and is_one(item) for name, item in value.items()
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _is_dense(value: Any) -> bool:
    return _is_tensor(value) and value.layout is torch.strided


def _is_param(value: Any) -> bool:
    if not (type(value) in (tuple, list) and len(value) == 4):
        return False
    name, shape, strides, dtype = value
    return (
        isinstance(name, str)
        and isinstance(dtype, str)
        and _is_list_of(shape, is_whole)
        and _is_list_of(strides, is_whole)
    )


def _is_identity(value: Any) -> bool:
    return (
        _is_dict_of(value, lambda _: True)
        and set(value) - {"run"} == {"accumulator", "terms", "batch_norms", "params"}
        and is_whole(value.get("run", 1), 1)
        and isinstance(value["accumulator"], str)
        and (value["terms"] is None or is_whole(value["terms"], 1))
        and is_whole(value["batch_norms"])
        and _is_list_of(value["params"], _is_param)
    )


_Kind = tuple[Callable[[Any], bool], str]
_WHOLE: _Kind = (is_whole, "a whole number")
_POSITIVE: _Kind = (lambda value: is_whole(value, 1), "a whole number of at least 1")
_DISTINCT: _Kind = (
    lambda value: _is_list_of(value, is_whole) and len(set(value)) == len(value),
    "a list of whole numbers, all different",
)
_NUMBERS: _Kind = (lambda value: _is_list_of(value, is_number), "a list of numbers")
_KINDS: dict[str, _Kind] = {
    "window": _WHOLE,
    "steps": _WHOLE,
    "rank": _WHOLE,
    "world_size": _POSITIVE,
    "identity": (_is_identity, "what describes the engine"),
    "accumulate": _POSITIVE,
    "is_between_loops": (lambda value: type(value) is bool, "True or False"),
    "order": _DISTINCT,
    "places": _DISTINCT,
    "counts": _NUMBERS,
    "dropped": (lambda value: _is_list_of(value, lambda item: type(item) is bool), "a list of bools"),
    "losses": (
        lambda value: _is_list_of(value, lambda item: item is None or is_number(item)),
        "a list of numbers, or None",
    ),
    "totals": (lambda value: _is_dict_of(value, is_number), "numbers by loss"),
    "sums": (
        lambda value: _is_dict_of(value, lambda parts: _is_dict_of(parts, _is_dense)),
        "tensors by part by parameter",
    ),
    "batch_norm": (lambda value: _is_list_of(value, _is_dense), "a list of tensors"),
    "carry": (lambda value: _is_dict_of(value, _is_tensor), "tensors by parameter"),
    "scaler": (lambda value: _is_dict_of(value, is_number), "numbers by name"),
    "residuals": (lambda value: _is_dict_of(value, _is_dense), "tensors by parameter"),
    "measured": (lambda value: _is_dict_of(value, _is_dense), "tensors by field"),
    "rng": (lambda value: _is_dict_of(value, lambda _: True), "states by generator"),
}
