"""Whether snapshots fit an engine: made alike, of one window,
and every part as that engine would have saved it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pyengine.checkpoint.snapshot import Identity, Snapshot, is_whole
from pyengine.data.rng import rng_problem
from pyengine.engine.engine import Engine
from pyengine.gradients.slots import local
from pyengine.ops.exact_reference import BLOCK

_Like: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
_WHOLE = ("growth_interval", "_growth_tracker")


def problems(engine: Engine, snapshots: Sequence[Snapshot]) -> list[str]:
    """Report why snapshots cannot be parts of one window of this engine."""
    if not snapshots:
        return ["states: got none; pass this rank's state, or those of all ranks"]
    form = Form(engine)
    found: list[str] = []
    for snapshot in snapshots:
        misfit = _misfit(snapshot, engine.identity)
        found += [misfit] if misfit else form.problems(snapshot)
    positions = sorted({(s.window, s.steps) for s in snapshots})
    if len(positions) > 1:
        listed = ", ".join(f"{window} windows and {steps} steps" for window, steps in positions)
        found.append(
            f"states are of different windows ({listed}): keep those whose state['window'] is that of the "
            "parameters"
        )
    return found


def _misfit(snapshot: Snapshot, identity: Identity) -> str:
    theirs = snapshot.identity
    kinds = [(one.accumulator, one.terms, one.run) for one in (theirs, identity)]
    if kinds[0] != kinds[1]:
        (their_number, their_slots), (number, slots) = _window_of(theirs), _window_of(identity)
        return (
            f"state of accumulator={theirs.accumulator!r} with {their_number} micro-batches a "
            f"window{their_slots}, this is accumulator={identity.accumulator!r} with {number}{slots}: make "
            "the engine as it was (pe.Exact(micro_batches=...) keeps the window on any world size)"
        )
    if theirs.batch_norms != identity.batch_norms:
        return (
            f"state replays {theirs.batch_norms} BatchNorms, this engine {identity.batch_norms}: make the "
            "engine from the module, not from its parameters, both times or neither"
        )
    pairs = zip(theirs.params, identity.params, strict=False)
    changed = next((f"{a} in the state, {b} here" for a, b in pairs if a != b), "")
    if not changed and len(theirs.params) != len(identity.params):
        changed = f"{len(theirs.params)} in the state, {len(identity.params)} here"
    return f"parameters differ: {changed}" if changed else ""


def _window_of(identity: Identity) -> tuple[str, str]:
    """Return the micro-batches of a window, as text, and in what it is cut."""
    number = "any" if identity.terms is None else str(identity.terms * identity.run)
    return number, f" in {identity.terms} slots" if identity.run > 1 else ""


class Form:
    """What the parts of a state that fits an engine look like."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rows = engine, engine.batch_norms.forms()
        # Of every trained parameter, the parts of its sum.
        self.sums = {
            name: _parts(math.prod(shape), getattr(torch, dtype), engine.identity.accumulator)
            for name, shape, _, dtype in engine.identity.params
        }
        self.sums |= {name: {"sum": form} for name, form in engine.reducer.sum_forms().items()}

    def problems(self, snapshot: Snapshot) -> list[str]:
        """Report what in a snapshot is not as it would have been saved."""
        numbers = _numbers_differ(snapshot)
        if numbers:
            return [numbers]
        looks = (
            *(self._place, self._count, self._totals, self._sum, self._row),
            *(self._carry, self._residual, self._order, self._scaler, _rng),
        )
        return [f"state of {snapshot.owner} has {text}" for look in looks for text in look(snapshot)]

    def _place(self, s: Snapshot) -> Iterator[str]:
        total = self.engine.shares.total
        if s.rank >= s.world_size:
            yield f"rank={s.rank}, need less than world_size={s.world_size}"
        if s.places and max(s.places) >= total:
            yield f"places={s.places}, need indices from 0 to {total - 1}, the micro-batches of a window"

    def _count(self, s: Snapshot) -> Iterator[str]:
        for place, count in zip(s.places, s.counts, strict=True):
            if not self.engine.counts.is_valid(count):
                yield (
                    f"count={count} at place {place}: no step could use this window, so go on from an "
                    "earlier state"
                )

    def _totals(self, s: Snapshot) -> Iterator[str]:
        for name, total in s.totals.items():
            if not (math.isfinite(total) and total >= 0):
                yield f"totals[{name!r}]={total}, need a finite number of at least 0"

    def _sum(self, s: Snapshot) -> Iterator[str]:
        if s.sums and not s.places:
            yield f"sums of {list(s.sums)}, and places=[]"
        watched: dict[torch.dtype, set[bool]] = {}  # of a type all are watched or none
        for name, parts in s.sums.items():
            like = self.sums.get(name)
            if like is None:
                yield f"a sum of {name!r}, which is no parameter here"
                continue
            watched.setdefault(next(iter(like.values()))[0], set()).add("nonfinite" in parts)
            flags: dict[str, _Like] = {"nonfinite": (torch.uint8, (len(s.places),))}
            needed = like | flags if "nonfinite" in parts else like
            yield from _unlike(f"sums[{name!r}]", parts, needed)
        if any(len(have) > 1 for have in watched.values()):
            yield "'nonfinite' of some parameters and not of others"

    def _row(self, s: Snapshot) -> Iterator[str]:
        needed = self.rows if s.places else []
        if len(s.batch_norm) != len(needed):
            yield f"{len(s.batch_norm)} tables of running statistics, need {len(needed)}"
            return
        for index, (table, own) in enumerate(zip(s.batch_norm, needed, strict=True)):
            like = own.dtype, (len(s.places), *own.shape[1:])
            yield from _unlike("batch_norm", {str(index): table}, {str(index): like})
        if s.batch_norm and bool((s.batch_norm[-1] < 0).any()):
            yield "negative numbers of calls in batch_norm"

    def _carry(self, s: Snapshot) -> Iterator[str]:
        reducer = self.engine.reducer
        params = zip(reducer.names, reducer.params, strict=True)
        own = {name: (param.dtype, tuple(local(param).shape)) for name, param in params}
        for name in s.carry.keys() - own.keys():
            yield f"carry[{name!r}], which is no parameter here"
        known = s.carry.keys() & own.keys()
        yield from _unlike("carry", {n: s.carry[n] for n in known}, {n: own[n] for n in known})

    def _residual(self, s: Snapshot) -> Iterator[str]:
        # Of as many elements as a whole sum has, which under tensor parallelism is a part of the parameter's.
        trained = {
            name: self.sums[name]["sum"][1] if "sum" in self.sums[name] else (math.prod(shape),)
            for name, shape, _, _ in self.engine.identity.params
        }
        for name in s.residuals.keys() - trained.keys():
            yield f"residuals[{name!r}], which is no parameter here"
        known = s.residuals.keys() & trained.keys()
        needed: dict[str, _Like] = {name: (torch.float32, trained[name]) for name in known}
        yield from _unlike("residuals", {name: s.residuals[name] for name in known}, needed)
        if any(not bool(s.residuals[name].isfinite().all()) for name in known):
            yield "residuals that are not finite"

    def _order(self, s: Snapshot) -> Iterator[str]:
        reducer = self.engine.reducer
        trained = (index for index, name in enumerate(reducer.names) if name in self.sums)
        if not set(s.order).issubset(trained):
            yield f"order={s.order}, need indices of parameters that are trained"

    def _scaler(self, s: Snapshot) -> Iterator[str]:
        scaler = self.engine.scaler
        if scaler is None or not s.scaler:
            return
        needed = scaler.state_dict().keys()
        if s.scaler.keys() != needed:
            yield f"{sorted(s.scaler)} of the loss scaler, need {sorted(needed)}"
        for name, value in s.scaler.items():
            if not (math.isfinite(value) and value >= 0):
                yield f"scaler[{name!r}]={value}, need a finite number"
            elif name in _WHOLE and not is_whole(value):
                yield f"scaler[{name!r}]={value}, need a whole number"


def _parts(numel: int, dtype: torch.dtype, accumulator: str) -> dict[str, _Like]:
    """Describe the sum of one parameter; see `Saved`."""
    if accumulator == "exact":
        blocks = -(-numel // BLOCK)
        return {"limbs": (torch.int32, (2, blocks, BLOCK)), "bins": (torch.uint8, (blocks,))}
    is_widened = accumulator == "fp32" and dtype.itemsize < torch.float32.itemsize
    return {"sum": (torch.float32 if is_widened else dtype, (numel,))}


def _numbers_differ(s: Snapshot) -> str:
    done = len(s.places)
    tables = [parts["nonfinite"] for parts in s.sums.values() if "nonfinite" in parts] + s.batch_norm
    rows = {table.shape[0] if table.dim() else None for table in tables}
    if {len(s.counts), len(s.losses), len(s.dropped) or done, *rows} - {done}:
        return f"state of {s.owner} has parts of other numbers of micro-batches than {done}"
    return ""


def _unlike(what: str, parts: dict[str, Tensor], needed: dict[str, _Like]) -> Iterator[str]:
    """Report which tensors have another type or shape than needed, or which others are there."""
    if parts.keys() != needed.keys():
        yield f"{what} of {sorted(parts)}, need {sorted(needed)}"
        return
    for name, tensor in parts.items():
        dtype, shape = needed[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            yield f"{what}[{name!r}] of {got}, need {dtype} {list(shape)}".replace("torch.", "")


def _rng(s: Snapshot) -> Iterator[str]:
    problem = rng_problem(s.rng)
    if problem:
        yield problem
