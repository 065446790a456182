"""Make snapshots of an engine, and continue from them, on as many ranks as there are now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyengine.checkpoint.snapshot import (
    Identity,
    Snapshot,
    disjoint,
    in_order,
    merge,
    share_residuals,
)
from pyengine.data.rng import rng_problem, rng_refusal, rng_states
from pyengine.engine.engine import Engine
from pyengine.engine.handshake import raise_problems
from pyengine.gradients.local_part import is_dtensor
from pyengine.gradients.settings import sum_dtype
from pyengine.gradients.slots import local
from pyengine.ops.exact_reference import BLOCK
from pyengine.step.grad_scaler import state_problems
from pyengine.window.counter import State, share_of_rest


def take_snapshot(engine: Engine) -> Snapshot:
    """Return this rank's part; every rank calls this where it could call `synchronize`.

    The sums are copied on their device; a snapshot that was loaded and not continued is returned as it was.
    """
    engine.reach_verdicts()
    counter = engine.counter
    if counter.is_sent and not engine.is_closed:
        raise RuntimeError(
            f"state_dict: the gradients of window {counter.index} have been sent and not been used: call it "
            "before the window's last backward, or after sync.step"
        )
    _check_between(engine)
    is_open = counter.state is State.OPEN
    scaler = engine.scaler
    engine.follow_scale()
    snapshot = Snapshot(
        counter.num_sent,
        engine.verdicts.steps_taken,
        engine.comm.rank,
        engine.comm.world_size,
        engine.identity,
        counter.accumulate,
        engine.is_between_loops,
        list(dict.fromkeys(engine.reducer.order())),
        carry=engine.kept_grads.save(),
        residuals=engine.reducer.residuals.save(),
        scaler={} if scaler is None else scaler.state_dict(),
        measured={m.field: state for m in engine.measures if (state := m.state()) is not None},
        rng=engine.rng_due or rng_states(),  # those of a loaded state, until a loop continues it
    )
    loaded = engine.resumed
    if is_open and counter.done:
        snapshot.places = list(counter.places)
        snapshot.counts = [float(count) for count in engine.counts.counts]
        losses = engine.counts.losses
        snapshot.losses = [None if loss is None else float(loss) for loss in losses]
        dropped = [bool(is_dropped) for is_dropped in engine.counts.dropped]
        snapshot.dropped = dropped if any(dropped) else []
        known = engine.denominators
        snapshot.totals = dict(known.totals if known else loaded.totals if loaded else {})
        if loaded is not None:
            snapshot.sums, snapshot.batch_norm = loaded.sums, loaded.batch_norm
            return snapshot
        snapshot.sums, snapshot.batch_norm = engine.reducer.save(), engine.batch_norms.save()
        for parts in snapshot.sums.values():
            if "nonfinite" in parts:  # by run
                parts["nonfinite"] = engine.runs.spread(parts["nonfinite"])
    return snapshot


def _check_between(engine: Engine) -> None:
    """Raise RuntimeError unless this rank is between two micro-batches, or slots, of a usable window."""
    counter = engine.counter
    is_open = counter.state is State.OPEN
    if is_open and counter.done != counter.handed:
        raise RuntimeError(
            f"state_dict: {counter.handed} micro-batches of window {counter.index} were handed out and "
            f"{counter.done} came to sync.backward: call it between two micro-batches"
        )
    engine.look()
    if is_open and engine.runs.is_open:
        raise RuntimeError(
            f"state_dict: place {counter.latest} of window {counter.index} is inside a slot of "
            f"{engine.shares.run} micro-batches, whose sum is half made: call it where sync.is_slot_end"
        )
    refusals = engine.counts.refusals
    if is_open and refusals:
        raise RuntimeError(
            f"state_dict: no step could use window {counter.index} ({refusals[0]}): call sync.abandon() first"
        )


def load_states(engine: Engine, states: object) -> None:
    """Continue from this rank's snapshot, or divide those of all ranks among the ranks there are now.

    Raises ValueError, on every rank and with nothing changed, if states do not fit the engine, each other, or
    those of other ranks.
    """
    engine.assemble("calls sync.load_state_dict, as every rank has to")
    found, described, part = _prepare(engine, states)
    gathered = _agree(engine, found, described)
    # What could fail has been tried: from here on every rank does the same.
    done = sorted({place for other in gathered for *_, places, _ in other.parts for place in places})
    # The order of buckets on which the ranks had agreed, or were about to: that of the first which knows one.
    if orders := sorted((rank, order) for each in gathered for rank, order in each.orders):
        engine.reducer.lay_out_as(list(orders[0][1]))
    assert part is not None and described is not None
    if engine.scaler is not None and part.scaler:
        engine.scaler.load_state_dict(part.scaler)
    engine.resume(part, due=_due(engine, done, part, is_own=described.is_own))


# Rank, world size, places and checksum of a part.
_Part = tuple[int, int, tuple[int, ...], int]


@dataclass(frozen=True)
class _Described:
    """A description of a rank's parts, which ranks compare."""

    is_own: bool  # whether each loads its own
    position: tuple[int, int]  # windows and steps
    parts: tuple[_Part, ...]  # of the window
    scaler: tuple[tuple[str, float], ...]  # state of the loss scaler, which all ranks share
    # Rank, and the order of buckets, of those parts that know one.
    orders: tuple[tuple[int, tuple[int, ...]], ...]

    def __str__(self) -> str:
        parts = [
            f"rank {r} of {w} with micro-batches {list(places)} ({crc})" for r, w, places, crc in self.parts
        ]
        scaler = f", loss scaler {dict(self.scaler)}" if self.scaler else ""
        whose = "its own" if self.is_own else "a list"
        return ", ".join([f"{whose} at (windows, steps) = {self.position}{scaler}", *parts])

    @classmethod
    def of(cls, parts: Sequence[Snapshot], *, is_own: bool) -> _Described:
        return cls(
            is_own,
            (parts[0].window, parts[0].steps),
            tuple((s.rank, s.world_size, tuple(s.places), s.checksum) for s in parts),
            tuple(sorted(parts[0].scaler.items())),
            tuple((s.rank, tuple(s.order)) for s in parts if s.order and s.world_size > 1),
        )


def _prepare(engine: Engine, states: object) -> tuple[list[str], _Described | None, Snapshot | None]:
    """Read, check and merge, and change nothing.

    Returns problems, instead of any exception, since other ranks wait; and if there are none a description
    for the others, and the snapshot to continue from.
    """
    try:
        snapshots = _read(engine, states)
        is_own = _loads_own(engine, states, snapshots)
        own = [s for s in snapshots if (s.rank, s.world_size) == (engine.comm.rank, engine.comm.world_size)]
        found = list(_misfits(engine, snapshots, own, is_own=is_own))
        if own and not found and (refusal := rng_refusal(own[0].rng)):
            found = [f"state of {own[0].owner} has {refusal}"]
        if not found:
            parts = own if is_own else in_order(snapshots)
            return [], _Described.of(parts, is_own=is_own), _put_together(engine, parts, own, is_own=is_own)
    except Exception as error:  # noqa: BLE001 - the others would wait for this rank's answer
        found = [str(error) if isinstance(error, ValueError) else f"states cannot be read: {error!r}"]
    return found, None, None


def _read(engine: Engine, states: object) -> list[Snapshot]:
    if not isinstance(states, Sequence | dict):
        raise ValueError(  # noqa: TRY004 - as of a state that cannot be read
            f"states is a {type(states).__name__}: need a state_dict, or a list of them"
        )
    if not engine.is_closed:
        index = engine.counter.index
        raise ValueError(f"load_state_dict in the middle of window {index}: call it between windows")
    listed = [states] if isinstance(states, dict) else states
    largest = max(param.numel() for param in engine.reducer.params)
    return [snapshot for state in listed for snapshot in Snapshot.read(state, largest=largest)]


def _loads_own(engine: Engine, states: object, snapshots: Sequence[Snapshot]) -> bool:
    """Whether each rank continues from its own part; else all parts are divided. Sums that are not exact
    cannot be, but between windows there are none.
    """
    if isinstance(states, dict) and len(snapshots) < 2:
        return True
    if engine.is_exact:
        return False
    is_as_before = all(snapshot.world_size == engine.comm.world_size for snapshot in snapshots)
    return is_as_before or any(snapshot.places for snapshot in snapshots)


def _put_together(engine: Engine, parts: list[Snapshot], own: list[Snapshot], *, is_own: bool) -> Snapshot:
    rank, world_size = engine.comm.rank, engine.comm.world_size
    if is_own:
        mine, residuals = own, own[0].residuals
    else:
        # This rank's own part, if it has one, and some of those whose ranks are gone.
        kept = disjoint(parts)
        mine = [s for s in kept if (s.rank, s.world_size) == (rank, world_size)]
        mine += [s for s in kept if s.world_size != world_size][rank::world_size]
        residuals = share_residuals(parts, rank=rank, world_size=world_size, device=engine.device)
    # Kept gradients of a sharded model are this rank's own shards.
    part = merge([s for s in mine if s.places], (own or parts)[0], engine.device)
    part.rng, part.residuals = own[0].rng if own else {}, residuals
    return part


_UNUSED = (
    "step every optimizer, or set .grad to None, before sync.state_dict(), or start as many ranks as there "
    "were, sharded as they were"
)


def holds_shards(engine: Engine) -> bool:
    """Whether gradients are sharded, so that a rank can use kept ones of its own state only."""
    params: Sequence[Any] = [param for param in engine.reducer.params if is_dtensor(param)]
    return any(placement.is_shard() for param in params for placement in param.placements)


def _misfits(
    engine: Engine, snapshots: list[Snapshot], own: list[Snapshot], *, is_own: bool
) -> Iterator[str]:
    yield from problems(engine, snapshots)
    here = f"rank {engine.comm.rank} of {engine.comm.world_size}"
    owners = ", ".join(s.owner for s in snapshots)
    if is_own and len(own) != 1:
        hint = (
            "pass the states of all ranks in a list"
            if engine.is_exact
            else "start as many ranks as there were, or pass the states of all ranks in a list, of a window "
            "that was not begun; only accumulator='exact' shares out an open one"
        )
        yield f"states of {owners or 'nobody'} on {here}: {hint}"
    elif is_own and own[0].places and own[0].accumulate != engine.counter.accumulate:
        yield (
            f"state of accumulate={own[0].accumulate}, and this engine has "
            f"accumulate={engine.counter.accumulate}: the open window ends as it began; make the engine as "
            "it was, or load between windows"
        )
    if not is_own and not engine.is_exact:
        worlds = sorted({s.world_size for s in snapshots})
        # A world may be of any size in a state: no list of its ranks.
        if worlds != [len(snapshots)] or len({s.rank for s in snapshots}) < len(snapshots):
            yield (
                f"states of {owners} on {here}: need those of all ranks of one save, each once, to share out "
                "what they keep"
            )
    if not own and holds_shards(engine) and any(s.carry for s in snapshots):
        yield f"gradients that no optimizer has used, of {owners}, on {here}: {_UNUSED}"
    if not is_own and engine.holds_parts:
        yield (
            "states in a list, and ranks here hold other parameters or share batches: pass each rank its own "
            "state, on a mesh of the same shape"
        )
    has_scaler = engine.scaler is not None
    if any(bool(s.scaler) != has_scaler for s in snapshots if s.places):
        with_it = "no loss scale and this engine one" if has_scaler else "a loss scale and this engine none"
        yield f"states have {with_it}: set sync.scaler as it was before sync.load_state_dict"
    if any(s.places for s in snapshots):
        yield from engine.reducer.load_problems()
    for measure in engine.measures:
        for s in snapshots:
            if measure.field in s.measured:
                wrong = measure.load_problems(s.measured[measure.field])
                yield from (f"state of {s.owner} has {text}" for text in wrong)


def _agree(engine: Engine, found: list[str], described: _Described | None) -> list[_Described]:
    """Raise on every rank if any rank has a problem, or if ranks were given different states."""
    gathered = engine.comm.all_gather_object((found, described))
    raise_problems([texts for texts, _ in gathered])
    by_rank: list[_Described] = [other for _, other in gathered]
    shared = [(s.is_own, s.position, s.scaler, () if s.is_own else s.parts) for s in by_rank]
    # Ranks that share a batch hold the same micro-batches.
    heads = [by_rank[engine.shares.batches.index(batch)] for batch in set(engine.shares.batches)]
    places = [place for s in heads if s.is_own for *_, places, _ in s.parts for place in places]
    if len(set(shared)) > 1 or len(set(places)) < len(places):
        listed = "; ".join(f"rank {rank} got {each}" for rank, each in enumerate(by_rank))
        raise ValueError(
            f"states differ between ranks, or hold a micro-batch twice: {listed}. Pass every rank its own "
            "state, or all of them the same list"
        )
    return by_rank


def _due(engine: Engine, done: list[int], part: Snapshot, *, is_own: bool) -> list[int] | None:
    """Return what this rank still has to do of an open window; None if none is."""
    if is_own:
        share = engine.counter.share
        # Another rank may hold some, from an earlier sharing out.
        rest = [place for place in share if place not in done]
        # Over a sharded model all ranks are in a window, or none is: some may only have run padding in it.
        has_begun = bool(done) if engine.reducer.has_collective_forwards else bool(part.places)
        return rest if has_begun or len(rest) < len(share) else None
    if not done:
        return None
    everything = {place for places in engine.shares.places for place in places}
    return share_of_rest(
        everything, done, rank=engine.comm.rank, world_size=engine.comm.world_size, run=engine.shares.run
    )


# ---- whether snapshots fit an engine: of one window, and as it would have saved them ----


_Like: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def problems(engine: Engine, snapshots: Sequence[Snapshot]) -> Iterator[str]:
    """Report why snapshots cannot be parts of one window of this engine."""
    if not snapshots:
        yield "states: got none; pass this rank's state, or those of all ranks"
        return
    form = Form(engine)
    for snapshot in snapshots:
        misfit = _misfit(snapshot, engine.identity)
        yield from [misfit] if misfit else form.problems(snapshot)
    positions = sorted({(s.window, s.steps) for s in snapshots})
    if len(positions) > 1:
        listed = ", ".join(f"{window} windows and {steps} steps" for window, steps in positions)
        yield (
            f"states are of different windows ({listed}): keep those whose state['window'] is that of the "
            "parameters"
        )


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
        s, done = snapshot, len(snapshot.places)
        tables = [parts["nonfinite"] for parts in s.sums.values() if "nonfinite" in parts] + s.batch_norm
        rows = {table.shape[0] if table.dim() else None for table in tables}
        if {len(s.counts), len(s.losses), len(s.dropped) or done, *rows} - {done}:
            return [f"state of {s.owner} has parts of other numbers of micro-batches than {done}"]
        looks = self._numbers, self._sum, self._row, self._carry, self._residual
        found = [text for look in looks for text in look(snapshot)]
        found += [problem] if (problem := rng_problem(s.rng)) else []
        return [f"state of {s.owner} has {text}" for text in found]

    def _numbers(self, s: Snapshot) -> Iterator[str]:
        total = self.engine.shares.total
        if s.rank >= s.world_size:
            yield f"rank={s.rank}, need less than world_size={s.world_size}"
        if s.places and max(s.places) >= total:
            yield f"places={s.places}, need indices from 0 to {total - 1}, the micro-batches of a window"
        for place, count in zip(s.places, s.counts, strict=True):
            if not self.engine.counts.is_valid(count):
                yield (
                    f"count={count} at place {place}: no step could use this window, so go on from an "
                    "earlier state"
                )
        for name, total_count in s.totals.items():
            if not (math.isfinite(total_count) and total_count >= 0):
                yield f"totals[{name!r}]={total_count}, need a finite number of at least 0"
        reducer, scaler = self.engine.reducer, self.engine.scaler
        trained = (index for index, name in enumerate(reducer.names) if name in self.sums)
        if not set(s.order).issubset(trained):
            yield f"order={s.order}, need indices of parameters that are trained"
        if scaler is None or not s.scaler:
            return
        needed = scaler.state_dict().keys()
        if s.scaler.keys() != needed:
            yield f"{sorted(s.scaler)} of the loss scaler, need {sorted(needed)}"
        yield from state_problems(s.scaler)

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
        reducer, comm = self.engine.reducer, self.engine.comm
        if (s.rank, s.world_size) != (comm.rank, comm.world_size) and holds_shards(self.engine):
            return  # of other shapes, and not used
        params = zip(reducer.names, reducer.params, strict=True)
        own = {name: (param.dtype, tuple(local(param).shape)) for name, param in params}
        for name in s.carry.keys() - own.keys():
            yield f"carry[{name!r}], which is no parameter here"
        known = s.carry.keys() & own.keys()
        unlike = list(_unlike("carry", {n: s.carry[n] for n in known}, {n: own[n] for n in known}))
        # Of a sharded model they are shards.
        yield from (f"gradients that no optimizer has used: {_UNUSED} ({text})" for text in unlike[:1])
        kept = [] if unlike else [s.carry[name] for name in known]
        if not all(bool((grad._values() if grad.is_sparse else grad).isfinite().all()) for grad in kept):
            yield "kept gradients that are not finite, so that no step could use them"

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


def _parts(numel: int, dtype: torch.dtype, accumulator: str) -> dict[str, _Like]:
    """Describe the sum of one parameter; see `Saved`."""
    if accumulator == "exact":
        blocks = -(-numel // BLOCK)
        return {"limbs": (torch.int32, (2, blocks, BLOCK)), "bins": (torch.uint8, (blocks,))}
    return {"sum": (sum_dtype(accumulator, dtype), (numel,))}


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
