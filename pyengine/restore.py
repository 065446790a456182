"""Engines into snapshots, and back: on as many ranks as there are now."""

from __future__ import annotations

from collections.abc import Sequence

from pyengine.accumulator.base import dense_strides
from pyengine.engine import Engine
from pyengine.seed import rng_states, set_rng_states
from pyengine.snapshot import Identity, Snapshot, disjoint, merge, problems
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
        engine.steps_taken,
        engine.comm.rank,
        engine.comm.world_size,
        _identity(engine),
        engine.reducer.order(),
        carry=engine.carried(),
        scaler={} if engine.scaler is None else engine.scaler.state_dict(),
        rng=rng_states(),
    )
    if is_open and window.done:
        snapshot.places = list(window.places)
        snapshot.counts = [float(count) for count in engine.local.counts]
        snapshot.losses = [float(loss) for loss in engine.local.losses]
        snapshot.sums = engine.reducer.save()
        snapshot.batch_norm = engine.norms.save()
    return snapshot


def put(engine: Engine, states: object) -> list[int]:
    """Go on from one's own snapshot, or share those of all ranks out among the ranks there are now.

    Args:
        engine: between windows, best new; parameters and optimizer are the caller's to restore.
        states: this rank's `state_dict()`, or a list of those of every rank, the same on every rank.

    Returns:
        Places of the open window, over all ranks (of this rank alone with its own state), that are done.

    Raises:
        ValueError: states do not fit the engine, each other, or those of other ranks; on every rank, nothing has changed.
        RuntimeError: a window is open.
    """
    alone = isinstance(states, dict)
    found, snapshots = _read(engine, [states] if alone else states)
    own = [s for s in snapshots if (s.rank, s.world_size) == (engine.comm.rank, engine.comm.world_size)]
    if not found:
        found = _misfits(engine, snapshots, own, alone=alone)
    is_own = alone or engine.terms is None
    parts = own if is_own else disjoint(snapshots)
    done = sorted(place for part in parts for place in part.places)
    position = (snapshots[0].window, snapshots[0].steps) if snapshots else None
    _agree(engine, found, (is_own, position, [] if is_own else done))
    # The same split on every rank.
    mine = own if is_own else parts[engine.comm.rank :: engine.comm.world_size]
    _load(engine, mine, snapshots[0], _due(engine, done, is_own=is_own))
    if own:
        set_rng_states(own[0].rng)
    return done


def _due(engine: Engine, done: list[int], *, is_own: bool) -> list[int] | None:
    """Return what this rank still has to do of a window that has begun; None if it has not."""
    if not done:
        return None
    if is_own:
        return [place for place in engine.window.share if place not in done]
    assert engine.terms is not None
    return share_of_rest(engine.terms, done, rank=engine.comm.rank, world_size=engine.comm.world_size)


def _identity(engine: Engine) -> Identity:
    params = [
        (name, list(p.shape), list(dense_strides(p)), str(p.dtype).removeprefix("torch."))
        for name, p in zip(engine.reducer.names, engine.reducer.params, strict=True)
        if p.requires_grad
    ]
    return Identity(engine.kind, engine.terms, engine.norms.num_modules, params)


def _read(engine: Engine, states: object) -> tuple[list[str], list[Snapshot]]:
    if not isinstance(states, Sequence):
        return [f"states is a {type(states).__name__}: need a state_dict, or a list of them"], []
    if not engine.is_between_windows:
        return [f"load_state_dict in the middle of window {engine.window.index}: call it between windows"], []
    try:
        return [], [Snapshot.from_dict(state) for state in states]
    except ValueError as error:
        return [str(error)], []


def _misfits(engine: Engine, snapshots: list[Snapshot], own: list[Snapshot], *, alone: bool) -> list[str]:
    found = problems(snapshots, _identity(engine))
    if (alone or engine.terms is None) and len(own) != 1:
        owners = ", ".join(f"rank {s.rank} of {s.world_size}" for s in snapshots)
        hint = (
            "pass the states of all ranks in a list"
            if alone and engine.terms
            else "start as many ranks as there were"
        )
        found.append(
            f"states of {owners or 'nobody'} on rank {engine.comm.rank} of {engine.comm.world_size}: {hint}"
            + ("" if engine.terms else "; only accumulator='exact' goes on with other numbers of ranks")
        )
    if any(snapshot.scaler for snapshot in snapshots) and engine.scaler is None:
        found.append("states hold a loss scale: assign sync.scaler = pe.GradScaler() first")
    return found


def _agree(engine: Engine, found: list[str], said: object) -> None:
    """Raise on every rank if any rank has a complaint, or if ranks were given different things."""
    everybody = engine.comm.all_gather_object((found, said))
    complaints = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everybody) for text in texts]
    if complaints:
        raise ValueError("; ".join(complaints if engine.comm.world_size > 1 else found))
    if any(other != everybody[0][1] for _, other in everybody):
        listed = "; ".join(f"rank {rank} got {other}" for rank, (_, other) in enumerate(everybody))
        raise ValueError(
            f"states differ between ranks: (own, (windows, steps), micro-batches done): {listed}. Pass every rank its own state, "
            "or all of them the same list"
        )


def _load(engine: Engine, mine: list[Snapshot], any_: Snapshot, due: list[int] | None) -> None:
    if any_.order:
        engine.reducer.follow(any_.order)
    if engine.scaler is not None and any_.scaler:
        engine.scaler.load_state_dict(any_.scaler)
    empty = Snapshot(any_.window, any_.steps, any_.rank, any_.world_size, any_.identity)
    part = merge(mine, any_.identity) if mine else empty
    engine.resume(part, due=due, carried=any_.carry)


__all__ = ["put", "take"]
