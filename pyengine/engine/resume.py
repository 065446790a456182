"""Save the state of an engine in a snapshot, and continue from a snapshot."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyengine.data.rng import rng_problem, rng_refusal, rng_states, set_rng_states
from pyengine.engine.between_windows import check_same_call
from pyengine.engine.engine import Engine
from pyengine.engine.handshake import raise_problems
from pyengine.engine.snapshot import Identity, Snapshot
from pyengine.gradients.local_part import is_dtensor
from pyengine.gradients.slots import local
from pyengine.ops.device import flush, send
from pyengine.step.grad_scaler import state_problems

_log = logging.getLogger("pyengine.engine")


def take_snapshot(engine: Engine) -> Snapshot:
    """Return the snapshot of this rank; every rank calls this at the same point, like `synchronize`."""
    engine.reach_verdicts()
    counter = engine.counter
    if not engine.is_closed:
        raise RuntimeError(
            "call sync.state_dict() between windows, after sync.step(optimizer), or discard the window with "
            f"sync.abandon() first: window {counter.index} has {counter.handed} micro-batches, and "
            f"{counter.state.value}"
        )
    scaler = engine.scaler
    engine.follow_scale()
    return Snapshot(
        counter.num_sent,
        engine.verdicts.steps_taken,
        engine.comm.rank,
        engine.comm.world_size,
        engine.identity,
        engine.is_between_loops,
        list(engine.reducer.order()),
        engine.kept_grads.save(),
        {} if scaler is None else scaler.state_dict(),
        engine.reducer.residuals.save(),
        {m.field: state for m in engine.metrics if (state := m.state()) is not None},
        engine.rng_due or rng_states(),  # states from a loaded snapshot that no loop has restored yet
    )


def load_state(engine: Engine, state: object) -> None:
    """Continue from this rank's snapshot, or, with a different world size, from the snapshot of any rank.

    Raises ValueError on every rank, without any change, if a state does not fit its engine or the states of
    other ranks.
    """
    check_same_call(engine, "calls sync.load_state_dict, which every rank must call")
    problems, snapshot = _prepare(engine, state)
    described = None if snapshot is None else _Described.of(snapshot)
    gathered = engine.comm.all_gather_object((problems, described))
    raise_problems([texts for texts, _ in gathered])
    if len({each for _, each in gathered}) > 1:
        listed = "; ".join(f"rank {rank} got {each}" for rank, (_, each) in enumerate(gathered))
        raise ValueError(
            f"the ranks' states are from different saves: {listed}. Load states from one save on all ranks: "
            "each rank its own state or, on a different number of ranks, that of any saved rank"
        )
    assert snapshot is not None
    # All checks have passed, so from here on all ranks make the same calls.
    if snapshot.order:
        engine.reducer.lay_out_as(snapshot.order)
    if engine.scaler is not None and snapshot.scaler:
        engine.scaler.load_state_dict(snapshot.scaler)
    is_own = snapshot.world_size == engine.comm.world_size
    _resume(engine, snapshot if is_own else replace(snapshot, residuals={}, rng={}))


def _resume(engine: Engine, part: Snapshot) -> None:
    """Continue from a snapshot, between windows."""
    _log.debug("window %d: resume", part.window)
    engine.counter.go_to(part.window)
    engine.new_window()
    engine.kept_grads.load(part.carry)
    for metric in engine.metrics:
        metric.load(part.measured.get(metric.field))
    if lost := part.measured.keys() - {metric.field for metric in engine.metrics}:
        warnings.warn(
            f"load_state_dict: the state has {sorted(lost)} of earlier windows, but this engine does not "
            "measure them, so they are lost; call sync.measure before load_state_dict",
            stacklevel=3,
        )
    if engine.reducer.residuals.is_kept:
        scale = part.scaler.get("scale")
        known = None if scale is None else send([scale], torch.float32, engine.device).reshape(())
        engine.reducer.residuals.load(part.residuals, known)
    elif part.residuals:
        warnings.warn(
            "load_state_dict: the state has residuals of a wire with error feedback, but this engine's wire "
            "has no error feedback, so the residuals are lost",
            stacklevel=3,
        )
    engine.foreign.marks.record_published()
    engine.verdicts.restart(part.steps)
    engine.opened_at = part.window
    engine.loss_checks.is_first_window = True
    engine.rng_due = {} if part.is_between_loops else part.rng  # the first window restores the states
    if part.is_between_loops:
        set_rng_states(part.rng)  # restore before the loader draws random numbers
    flush(engine.device)


@dataclass(frozen=True)
class _Described:
    """The values that must be equal in the states of all ranks."""

    world_size: int
    position: tuple[int, int]  # completed windows and optimizer steps
    scaler: tuple[tuple[str, float], ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        scaler = f", loss scaler {dict(self.scaler)}" if self.scaler else ""
        return f"the state of one of {self.world_size} ranks at (windows, steps) = {self.position}{scaler}"

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Described:
        s = snapshot
        return cls(s.world_size, (s.window, s.steps), tuple(sorted(s.scaler.items())), tuple(s.order))


def _prepare(engine: Engine, state: object) -> tuple[list[str], Snapshot | None]:
    """Read and check a state, without changing the engine.

    Returns a list of problems, and the snapshot or None. Problems are not raised here, because other ranks
    wait for the answer of this rank.
    """
    try:
        if not engine.is_closed:
            return [
                f"load_state_dict in the middle of window {engine.counter.index}: call it between windows"
            ], None
        snapshot = Snapshot.read(state)
        found = list(_misfits(engine, snapshot))
        if not found and (refusal := rng_refusal(snapshot.rng)):
            found = [f"state of {snapshot.owner} has {refusal}"]
    except Exception as error:  # noqa: BLE001 - other ranks wait for this rank's answer
        found = [str(error) if isinstance(error, ValueError) else f"state cannot be read: {error!r}"]
    return (found, None) if found else ([], snapshot)


def _misfits(engine: Engine, snapshot: Snapshot) -> Iterator[str]:
    """Report why a snapshot does not fit an engine, or cannot come from any engine."""
    if snapshot.rank >= snapshot.world_size:
        yield f"state of {snapshot.owner}: expected a rank below the number of ranks"
    elif text := _misplaced(engine, snapshot) or _other(snapshot.identity, engine.identity):
        yield text
    else:
        for look in (_numbers, _carry, _residuals, _measured):
            yield from (f"state of {snapshot.owner} has {text}" for text in look(engine, snapshot))


def _misplaced(engine: Engine, snapshot: Snapshot) -> str:
    """Return why a state cannot be loaded with this rank and world size; empty if it can be loaded."""
    rank, world_size = engine.comm.rank, engine.comm.world_size
    here = f"state of {snapshot.owner} on rank {rank} of {world_size}"
    if snapshot.world_size == world_size:
        return "" if snapshot.rank == rank else f"pass each rank its own state: {here}"
    if engine.holds_parts and (engine.batch is not None or engine.reducer.model is None):
        return (
            f"start as many ranks as before, on a mesh of the same shape: {here}, and ranks hold different "
            "parameters or share batches"
        )
    if snapshot.carry and _holds_shards(engine):
        return f"{here} has gradients that no optimizer has used: {_UNUSED}"
    return ""


_UNUSED = (
    "step every optimizer, or set .grad to None, before sync.state_dict(), or start as many ranks as "
    "before, with the same sharding"
)


def _holds_shards(engine: Engine) -> bool:
    """Whether gradients are sharded, so that each rank can load kept gradients only from its own state."""
    params: list[Any] = [param for param in engine.reducer.params if is_dtensor(param)]
    return any(placement.is_shard() for param in params for placement in param.placements)


def _other(theirs: Identity, ours: Identity) -> str:
    """Describe differences between an engine and the engine that saved a state; empty if they match."""
    kinds = [(one.accumulator, one.terms, one.run) for one in (theirs, ours)]
    if kinds[0] != kinds[1]:
        (their_number, their_slots), (number, slots) = _window_of(theirs), _window_of(ours)
        return (
            f"state of accumulator={theirs.accumulator!r} with {their_number} micro-batches per "
            f"window{their_slots}, but this engine has accumulator={ours.accumulator!r} with "
            f"{number}{slots}: make the engine as it was (pe.Exact(micro_batches=...) keeps the window on "
            "any world size)"
        )
    pairs = zip(theirs.params, ours.params, strict=False)
    changed = next((f"{a} in the state, {b} here" for a, b in pairs if a != b), "")
    if not changed and len(theirs.params) != len(ours.params):
        changed = f"{len(theirs.params)} in the state, {len(ours.params)} here"
    return f"parameters differ: {changed}" if changed else ""


def _window_of(identity: Identity) -> tuple[str, str]:
    """Return the number of micro-batches and the number of slots of a window, as text."""
    number = "any" if identity.terms is None else str(identity.terms * identity.run)
    return number, f" in {identity.terms} slots" if identity.run > 1 else ""


def _numbers(engine: Engine, s: Snapshot) -> Iterator[str]:
    trained = {name for name, *_ in engine.identity.params}
    if not {index for index, name in enumerate(engine.reducer.names) if name in trained}.issuperset(s.order):
        yield f"order={s.order}, expected indices of parameters that are trained"
    if problem := rng_problem(s.rng):
        yield problem
    if engine.scaler is not None and s.scaler:
        needed = engine.scaler.state_dict().keys()
        if s.scaler.keys() != needed:
            yield f"{sorted(s.scaler)} of the loss scaler, expected {sorted(needed)}"
        yield from state_problems(s.scaler)


_Like: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def _carry(engine: Engine, s: Snapshot) -> Iterator[str]:
    params = zip(engine.reducer.names, engine.reducer.params, strict=True)
    unlike = _unlike("carry", s.carry, {name: (p.dtype, tuple(local(p).shape)) for name, p in params})
    # For a sharded model, compare gradients with the shapes of shards.
    yield from (f"gradients that no optimizer has used: {_UNUSED} ({text})" for text in unlike)


def _residuals(engine: Engine, s: Snapshot) -> Iterator[str]:
    residuals = engine.reducer.residuals
    if residuals.is_kept and s.world_size == engine.comm.world_size:
        needed: dict[str, _Like] = {
            name: (torch.float32, (numel,)) for name, numel in residuals.numels.items()
        }
        yield from _unlike("residuals", s.residuals, needed)


def _measured(engine: Engine, s: Snapshot) -> Iterator[str]:
    for metric in engine.metrics:
        if metric.field in s.measured:
            yield from metric.load_problems(s.measured[metric.field])


def _unlike(what: str, parts: dict[str, Tensor], needed: dict[str, _Like]) -> Iterator[str]:
    """Report tensors with an unknown name, a wrong dtype, a wrong shape, or nonfinite values."""
    for name, tensor in parts.items():
        if name not in needed:
            yield f"{what}[{name!r}], which is not a parameter here"
            continue
        dtype, shape = needed[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            yield f"{what}[{name!r}] of {got}, expected {dtype} {list(shape)}".replace("torch.", "")
        elif not bool(tensor.isfinite().all()):
            yield f"{what}[{name!r}] that is not finite, so no step could use it"
