"""Loading a damaged state either raises a clear error and changes nothing, or restores that state."""

from __future__ import annotations

import functools
import io
import pickle
import random
import zipfile
from collections.abc import Callable
from typing import Any

import numpy
import torch
from draw import LARGE, Draw
from torch import Tensor, nn

import pyengine as pe
from pyengine.data.rng import rng_states, set_rng_states

OWNER = "rank 0 of 1"
KINDS = ("fp32", "exact")
executed: list[str] = []


class Evil:
    """Records that its pickle was executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return executed.append, ("by a pickle",)


def run(data: bytes) -> None:
    """Damage a state, or its file, and load it."""
    draw = Draw(data)
    damage = draw.pick((_damaged_state, _damaged_file))
    damage(draw, draw.pick(KINDS))
    assert not executed, f"code was executed {executed}"


# ---- an engine between windows ----


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).square().sum()


@functools.cache
def _engine(kind: str) -> tuple[pe.GradSync, bytes]:
    """Return an engine and a state that it saved earlier, as the bytes of a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Model()
        sync = pe.GradSync(model, accumulate=3, accumulator=kind, bucket_cap_mb=1e-4)
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0)
        for index in range(6):
            with sync.accumulate():
                sync.backward(
                    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(index))), count=4
                )
                if sync.is_sync_step:
                    sync.unscale_()
        file = io.BytesIO()
        torch.save(sync.state_dict(), file)
        sync.abandon()
    return sync, file.getvalue()


def _saved(kind: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(_engine(kind)[1]), weights_only=True)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _everything(sync: pe.GradSync) -> bytes:
    grads = [None if param.grad is None else param.grad.clone() for param in sync._engine.reducer.params]
    return _packed([sync.state_dict(), grads])


def _load(kind: str, state: Any) -> None:
    """Load a state into an engine that has loaded a good one; it is restored, or refused without changes."""
    sync, _ = _engine(kind)
    sync.load_state_dict(_saved(kind))
    before = _everything(sync)
    try:
        sync.load_state_dict(state)
    except ValueError as error:
        assert "state" in str(error), f"the error does not say what is wrong: {error}"
        assert _everything(sync) == before, f"refused ({error}), and something has changed"
        return
    again = sync.state_dict()
    assert (again["window"], again["steps"]) == (state["window"], state["steps"])
    _draw_from(again[OWNER][0]["rng"])


def _draw_from(states: dict[str, Any]) -> None:
    """Draw from generators with these states, so that ASan finds wrong reads; restore the old states."""
    before = rng_states()
    set_rng_states(states)
    random.random(), numpy.random.random(1000), torch.rand(1000), torch.randn(3, dtype=torch.float64)
    set_rng_states(before)


# ---- damage to a dictionary ----


def _damaged_state(draw: Draw, kind: str) -> None:
    state = _saved(kind)
    spoilt = draw.pick((state, state[OWNER][0]))
    for _ in range(1 + draw.below(3)):
        _damage(draw, spoilt)
    _load(kind, state)


def _damage(draw: Draw, root: Any) -> None:
    """Walk to some entry of nested dicts and lists, and change it."""
    node, key = root, None
    for _ in range(1 + draw.below(5)):
        keys = _keys(node)
        if not keys:
            break
        parent, key = node, draw.pick(keys)
        node = parent[key]
        if isinstance(node, tuple):  # so that its entries can be changed
            node = parent[key] = list(node)
    if key is not None:
        draw.pick(DAMAGES)(draw, parent, key, root)


def _keys(node: Any) -> list[Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []


def _replace(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    parent[key] = draw.pick(VALUES)


def _number(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    parent[key] = draw.pick((draw.below(6), *LARGE, -1)) * draw.pick((1, 1.0, -1))


def _change(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    value = parent[key]
    if isinstance(value, Tensor):
        parent[key] = draw.pick(TENSORS)(value)
        if value.numel() and value.is_contiguous() and draw.once_in(2):
            value.view(-1).view(torch.uint8)[draw.below(value.nbytes)] ^= 1 << draw.below(8)
    elif isinstance(value, int | float):
        parent[key] = value + draw.pick((1, -1, 0.5))
    elif isinstance(value, str):
        parent[key] = value + "x"


def _remove(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    del parent[key]


def _double(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    if isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[draw.pick(("x", 0, None, f"{key}x"))] = parent[key]


def _exchange(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    other = draw.pick(_keys(parent))
    parent[key], parent[other] = parent[other], parent[key]


def _itself(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    parent[key] = draw.pick((root, parent))


def _generator(draw: Draw, parent: Any, key: Any, root: Any) -> None:
    """Change a generator's position, or another value that is stored with its words."""
    states = root.get("rng") if isinstance(root, dict) else None
    name = draw.pick(("numpy", "torch", "random"))
    state = states.get(name) if isinstance(states, dict) else None
    value = draw.pick((draw.below(2**16), draw.large(), 624, 623, 0, -1, 0.5, "x"))
    if isinstance(state, list) and state:
        state[draw.below(len(state))] = value
    elif isinstance(state, tuple) and len(state) == 3:
        assert states is not None
        version, words, normal = state
        changed = (value, words, normal), (version, words, value), (version, (*words[:-1], value), normal)
        states[name] = draw.pick(changed)
    elif (
        isinstance(state, Tensor) and state.dtype == torch.uint8 and state.numel() > 24 and not state.is_meta
    ):
        state[draw.pick((8, 9, 12, 16, 17, 18, 23, -4))] = draw.byte()


def _outside(tensor: Tensor) -> Tensor:
    """Return a sparse tensor with an index outside its shape."""
    indices = torch.full((max(1, tensor.dim()), 1), 2**40)
    values = torch.ones(1, dtype=tensor.dtype)
    return torch.sparse_coo_tensor(indices, values, tensor.shape or (1,), check_invariants=False)


DAMAGES = (_change, _remove, _replace, _number, _exchange, _double, _itself, _generator)
VALUES = (
    *(None, True, -0.0, float("inf"), float("nan"), "", "cpu", b"x", [], {}, (), [[]], {"a": 1}, {1: 1}),
    *(
        torch.zeros(()),
        torch.zeros(2),
        torch.zeros(0),
        torch.zeros(2, 64, dtype=torch.int32),
        object(),
        range(2),
    ),
)
TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t,
    lambda t: t[:-1] if t.dim() else t[None],
    lambda t: torch.cat([t, t]) if t.dim() else t,
    lambda t: t.double(),
    lambda t: t.to(torch.uint8),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.tolist(),
    lambda t: t.flatten(),
    lambda t: t.new_full(t.shape, 1).expand(3, *t.shape),
    lambda t: t.transpose(0, -1) if t.dim() > 1 else t.flip(0) if t.dim() else t,
    lambda t: torch.full_like(t, 255 if t.dtype == torch.uint8 else -(2**31)),
    lambda t: torch.full_like(t, 255 if t.dtype == torch.uint8 else 2**31 - 1),
    lambda t: torch._neg_view(t) if t.is_floating_point() else t,
    lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    _outside,
    lambda t: t.to_sparse_csr() if t.dim() == 2 else t,
    lambda t: t.new_ones(()).expand(2**40),
    lambda t: torch.sparse_coo_tensor(size=(2**20, 2**20), dtype=t.dtype),
)


# ---- damage to a file ----


def _damaged_file(draw: Draw, kind: str) -> None:
    content = bytearray(draw.pick((_engine(kind)[1], *_evil())))
    for _ in range(1 + draw.below(3)):
        draw.pick(CUTS)(draw, content)
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - torch cannot read these bytes
        return
    _load(kind, state)


def _flip(draw: Draw, content: bytearray) -> None:
    if content:
        content[draw.below(min(len(content), 2**16))] ^= 1 << draw.below(8)


def _cut(draw: Draw, content: bytearray) -> None:
    del content[draw.below(len(content) + 1) :]


def _leave_out(draw: Draw, content: bytearray) -> None:
    begin = draw.below(len(content) + 1)
    del content[begin : begin + draw.below(512)]


def _clear(draw: Draw, content: bytearray) -> None:
    begin, size = draw.below(len(content) + 1), draw.below(512)
    content[begin : begin + size] = bytes(len(content[begin : begin + size]))


def _overwrite(draw: Draw, content: bytearray) -> None:
    begin, piece = draw.below(len(content) + 1), draw.rest()
    content[begin : begin + len(piece)] = piece


def _keep(draw: Draw, content: bytearray) -> None:
    del draw, content


CUTS = (_flip, _cut, _leave_out, _clear, _overwrite, _keep)


@functools.cache
def _evil() -> tuple[bytes, bytes]:
    """Return pickles that execute code, without an archive and in an archive like torch.save's."""
    bare, packed = pickle.dumps(Evil()), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", bare)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return bare, packed.getvalue()
