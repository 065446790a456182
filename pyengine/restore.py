"""Engines into snapshots, and back: on as many ranks as there are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.engine import Engine
from pyengine.seed import rng_states
from pyengine.snapshot import Snapshot, disjoint, in_order, merge, problems
from pyengine.window import State, share_of_rest


def take(engine: Engine) -> Snapshot:
    """Return this rank's part; every rank calls this where it could call `synchronize`.

    Raises:
        RuntimeError: gradients are on their way or unused, or a micro-batch has been handed out and not come back.
    """
    engine.settle()
    window = engine.window
    if window.state is State.SYNCED and not engine.is_between_windows:
        raise RuntimeError(
            f"state_dict: the gradients of window {window.index} have been sent and not been used: call it before the "
            "window's last backward, or after sync.step"
        )
    is_open = window.state is State.OPEN
    if is_open and window.done != window.handed:
        raise RuntimeError(
            f"state_dict: {window.handed} micro-batches of window {window.index} were handed out and {window.done} came to "
            "sync.backward: call it between two micro-batches"
        )
    snapshot = Snapshot(
        window.index + (window.state is State.SYNCED),
        engine.outcomes.steps_taken,
        engine.comm.rank,
        engine.comm.world_size,
        engine.identity,
        window.accumulate,
        engine.is_between_loops,
        engine.reducer.order(),
        carry=engine.carry.save(),
        scaler={} if engine.scaler is None else engine.scaler.state_dict(),
        rng=rng_states(),
    )
    if is_open and window.done:
        snapshot.places = list(window.places)
        snapshot.counts = [float(count) for count in engine.local.counts]
        snapshot.losses = [float(loss) for loss in engine.local.losses]
        loaded = engine.resumed
        snapshot.sums = engine.reducer.save() if loaded is None else loaded.sums
        snapshot.batch_norm = engine.norms.save() if loaded is None else loaded.batch_norm
    return snapshot


def put(engine: Engine, states: object) -> list[int]:
    """Go on from one's own snapshot, or share those of all ranks out among the ranks there are now.

    Args:
        engine: between windows, best new; parameters and optimizer are the caller's to restore.
        states: this rank's `state_dict()`, or a list of those of every rank, the same on every rank.

    Returns:
        Places of the open window that are done, over all ranks.

    Raises:
        ValueError: states do not fit the engine, each other, or those of other ranks; on every rank, nothing has changed.
    """
    engine.settle()
    alone = isinstance(states, dict)
    found, snapshots = _read(engine, [states] if alone else states)
    own = [s for s in snapshots if (s.rank, s.world_size) == (engine.comm.rank, engine.comm.world_size)]
    is_own = alone or engine.terms is None
    found = found or _misfits(engine, snapshots, own, is_own=is_own)
    parts = own if is_own else in_order(snapshots)
    everybody = _agree(engine, found, _Said.of(parts, is_own=is_own))
    done = sorted({place for said in everybody for part in said.parts for place in part[2]})
    if order := _order(everybody):
        engine.reducer.follow(order)
    mine = own if is_own else _mine(engine, disjoint(parts))
    about = own[0] if is_own else parts[0]
    if engine.scaler is not None and about.scaler:
        engine.scaler.load_state_dict(about.scaler)
    rng = own[0].rng if own else {}
    part = merge([s for s in mine if s.places], about, engine.device)
    part.rng = rng
    engine.resume(part, due=_due(engine, done, part, is_own=is_own))
    return done


# Rank, world size and places of a part.
_Part = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class _Said:
    """What ranks tell each other of their parts.

    Attributes:
        is_own: whether each loads its own.
        position: windows and steps.
        parts: of the window.
        orders: rank, and the order of buckets, of those parts that know one.
    """

    is_own: bool
    position: tuple[int, int] | None
    parts: tuple[_Part, ...]
    orders: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, parts: Sequence[Snapshot], *, is_own: bool) -> _Said:
        return cls(
            is_own,
            (parts[0].window, parts[0].steps) if parts else None,
            tuple((s.rank, s.world_size, tuple(s.places)) for s in parts),
            tuple((s.rank, tuple(s.order)) for s in parts if s.order and s.world_size > 1),
        )


def _read(engine: Engine, states: object) -> tuple[list[str], list[Snapshot]]:
    if not isinstance(states, Sequence):
        return [f"states is a {type(states).__name__}: need a state_dict, or a list of them"], []
    if not engine.is_between_windows:
        return [f"load_state_dict in the middle of window {engine.window.index}: call it between windows"], []
    try:
        return [], [Snapshot.from_dict(state) for state in states]
    except ValueError as error:
        return [str(error)], []


def _misfits(engine: Engine, snapshots: list[Snapshot], own: list[Snapshot], *, is_own: bool) -> list[str]:
    found = problems(snapshots, engine.identity)
    here = f"rank {engine.comm.rank} of {engine.comm.world_size}"
    if is_own and len(own) != 1:
        owners = ", ".join(f"rank {s.rank} of {s.world_size}" for s in snapshots)
        hint = (
            "start as many ranks as there were; only accumulator='exact' goes on with other numbers of ranks"
            if engine.terms is None
            else "pass the states of all ranks in a list"
        )
        found.append(f"states of {owners or 'nobody'} on {here}: {hint}")
    elif is_own and own[0].places and own[0].accumulate != engine.window.accumulate:
        found.append(
            f"state of accumulate={own[0].accumulate}, and this engine has accumulate={engine.window.accumulate}: the open "
            "window ends as it began; make the engine as it was, or load between windows"
        )
    scaled = [bool(s.scaler) for s in snapshots if s.places]
    if any(is_scaled != (engine.scaler is not None) for is_scaled in scaled):
        with_it = (
            "a loss scale and this engine none"
            if engine.scaler is None
            else "no loss scale and this engine one"
        )
        found.append(f"states have {with_it}: set sync.scaler as it was before sync.load_state_dict")
    if any(s.places for s in snapshots):
        found += engine.reducer.refuses_load()
    return found


def _agree(engine: Engine, found: list[str], said: _Said) -> list[_Said]:
    """Raise on every rank if any rank has a complaint, or if ranks were given different things."""
    everybody = engine.comm.all_gather_object((found, said))
    complaints = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everybody) for text in texts]
    if complaints:
        raise ValueError("; ".join(complaints if engine.comm.world_size > 1 else found))
    told: list[_Said] = [other for _, other in everybody]
    shared = [(s.is_own, s.position, () if s.is_own else s.parts) for s in told]
    if len(set(shared)) > 1:
        listed = "; ".join(
            f"rank {rank} got {'its own' if is_own else 'a list'} at (windows, steps) = {position}"
            + "".join(f", rank {r} of {w} with micro-batches {list(places)}" for r, w, places in parts)
            for rank, (is_own, position, parts) in enumerate(shared)
        )
        raise ValueError(
            f"states differ between ranks: {listed}. Pass every rank its own state, or all of them the same list"
        )
    return told


def _order(everybody: Sequence[_Said]) -> list[int]:
    """Return the order of buckets that the run had agreed on, or was about to: the longest-known, rank 0's first."""
    orders = sorted((rank, order) for said in everybody for rank, order in said.orders)
    return list(orders[0][1]) if orders else []


def _mine(engine: Engine, parts: Sequence[Snapshot]) -> list[Snapshot]:
    """Return this rank's share: its own part, if it has one, and some of those whose ranks are no more."""
    rank, world_size = engine.comm.rank, engine.comm.world_size
    orphans = [s for s in parts if s.world_size != world_size]
    return [s for s in parts if (s.rank, s.world_size) == (rank, world_size)] + orphans[rank::world_size]


def _due(engine: Engine, done: list[int], part: Snapshot, *, is_own: bool) -> list[int] | None:
    """Return what this rank still has to do of a window that has begun; None if it has not."""
    if is_own:
        return [place for place in engine.window.share if place not in part.places] if part.places else None
    if not done:
        return None
    everything = {place for places in engine.shares.places for place in places}
    return share_of_rest(everything, done, rank=engine.comm.rank, world_size=engine.comm.world_size)


__all__ = ["put", "take"]
