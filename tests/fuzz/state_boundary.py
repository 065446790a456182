"""Damaged states: an error that names what is wrong and leaves everything as it was, or what was saved."""

from __future__ import annotations

import functools
import io
import pickle
import random
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from draw import LARGE, Draw
from torch import Tensor, nn

import pyengine as pe
from pyengine.checkpoint import state_file
from pyengine.checkpoint.checksum import checksum
from pyengine.data.rng import rng_states, set_rng_states

OWNER = "rank 0 of 1"
KINDS = ("fp32", "exact")
ORIGIN = state_file.Origin(step=3, rank=0, world_size=1, save="one")
executed: list[str] = []


class Evil:
    """Tells when a pickle of it is executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return executed.append, ("by a pickle",)


def run(data: bytes) -> None:
    """Damage a state in memory or its file, and load it."""
    draw = Draw(data)
    damage = draw.pick((_damaged_state, _damaged_file))
    damage(draw, draw.pick(KINDS))
    assert not executed, f"code was executed {executed}"


# ---- an engine in the middle of a window ----


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).square().sum()


@functools.cache
def _engine(kind: str) -> tuple[pe.GradSync, bytes]:
    """Return an engine, and its state at another time, as a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Model()
        sync = pe.GradSync(model, accumulate=3, accumulator=kind, bucket_cap_mb=1e-4)
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0)
        for index in range(5):
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


def _everything(sync: pe.GradSync) -> int:
    grads = [param.grad for param in sync._engine.reducer.params]
    return checksum([sync.state_dict()[OWNER][0], grads, sync.window, sync.due])


def _load(kind: str, state: Any, want: int) -> None:
    """Load a state into an engine that stands where a good one was; taken, it is what the engine holds."""
    sync, _ = _engine(kind)
    sync.abandon()
    sync.load_state_dict(_saved(kind))
    sync.abandon()  # between windows
    before = _everything(sync)
    try:
        sync.load_state_dict(state)
    except ValueError as error:
        assert "state" in str(error), f"the error does not say what is wrong: {error}"
        assert _everything(sync) == before, f"refused ({error}), and something has changed"
        return
    content = sync.state_dict()[OWNER][0]
    assert _meaning(content) == want, "taken, and the engine holds something else"
    _draw_from(content["rng"])


def _draw_from(states: dict[str, Any]) -> None:
    """Let generators go on from states, which ASan sees if it is from somewhere else; and put them back."""
    before = rng_states()
    set_rng_states(states)
    random.random(), numpy.random.random(1000), torch.rand(1000), torch.randn(3, dtype=torch.float64)
    set_rng_states(before)


def _meaning(content: Any) -> int:
    """Sum up a state's content, however it is written: flags that are all 0 may be left out, and what is
    empty.
    """
    plain = {name: value for name, value in content.items() if name not in ("dropped", "totals") or value}
    plain["counts"] = [float(count) for count in content["counts"]]
    plain["losses"] = [None if loss is None else float(loss) for loss in content["losses"]]
    plain["sums"] = {
        name: {part: t for part, t in parts.items() if part != "nonfinite" or t.any()}
        for name, parts in content["sums"].items()
    }
    return checksum(plain)


# ---- damage to a dictionary ----


def _damaged_state(draw: Draw, kind: str) -> None:
    state = _saved(kind)
    want = _meaning(state[OWNER][0])
    form = draw.pick(("as saved", "flat", "forged"))
    if form == "flat":  # version 1: without a checksum
        state = {"version": 1, **state[OWNER][0]}
    spoilt = state[OWNER][0] if form == "forged" else state
    for _ in range(1 + draw.below(3)):
        _damage(draw, spoilt)
    if form != "as saved":
        try:
            content = spoilt if form == "forged" else {k: v for k, v in spoilt.items() if k != "version"}
            want, crc = _meaning(content), checksum(content)
        except Exception:  # noqa: BLE001 - then no checksum fits, and it will be refused
            want = crc = -1
    if form == "forged":
        state = {"version": 2, "window": spoilt.get("window"), "steps": spoilt.get("steps")}
        state[OWNER] = spoilt, crc
    _load(kind, draw.pick((state, [state])) if kind == "exact" else state, want)


def _damage(draw: Draw, root: Any) -> None:
    """Walk to some place in nested dicts and lists, and change what is there."""
    node, key = root, None
    for _ in range(1 + draw.below(5)):
        keys = _keys(node)
        if not keys:
            break
        parent, key = node, draw.pick(keys)
        node = parent[key]
        if isinstance(node, tuple):  # so that what is in it can be changed
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
    """Change where a generator is, and what stands beside its words."""
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
    """Return a sparse tensor of which an index is outside of its shape."""
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


@functools.cache
def _folder() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    folder = tempfile.TemporaryDirectory()
    return folder, Path(folder.name) / "part.pt"


@functools.cache
def _file(kind: str) -> bytes:
    _, path = _folder()
    state_file.write(path, ORIGIN, _saved(kind))
    return path.read_bytes()


def _damaged_file(draw: Draw, kind: str) -> None:
    content = bytearray(_file(kind))
    for _ in range(1 + draw.below(3)):
        draw.pick(CUTS)(draw, content)
    is_forged = draw.once_in(2)
    if is_forged:
        content = draw.pick((_with_checksum, _with_header))(draw, content)
    _, path = _folder()
    path.write_bytes(content)
    try:
        origin = state_file.check(path)
    except (ValueError, OSError):
        return
    if not is_forged:
        same = bytes(content[256:]) == _file(kind)[256:]  # before that are blanks, too
        assert same and origin == ORIGIN, "a damaged file was taken for a whole one"
    try:
        state = state_file.read(path)
    except Exception:  # noqa: BLE001 - of bytes that nobody has saved with this checksum
        assert is_forged
        return
    _load(kind, state, _meaning(_saved(kind)[OWNER][0]))


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


def _with_checksum(draw: Draw, content: bytearray) -> bytearray:
    """Give what is there, or a pickle that executes something, a header that fits."""
    payload = draw.pick((bytes(content[256:]), *_evil()))
    _, path = _folder()
    state_file.write(path, ORIGIN, 0)
    header = path.read_bytes()[: state_file._HEADER_BYTES]
    said = state_file._header(header)
    text = _text({**said, "bytes": len(payload), "crc32": zlib.crc32(payload)})
    return bytearray(text) + payload


def _with_header(draw: Draw, content: bytearray) -> bytearray:
    """Give the payload a header whose own checksum fits, of anything."""
    said: Any = state_file._header(_file(KINDS[0])[: state_file._HEADER_BYTES])
    odd = draw.pick((said, [], 3, None, {}))
    if odd is said:
        said[draw.pick([*said])] = draw.pick((None, "x", -1, 1.5, [], 2, 10**40))
        if draw.once_in(4):
            said.pop(draw.pick([*said]))
    return bytearray(_text(odd)) + content[256:]


def _text(said: Any) -> bytes:
    import json

    text = json.dumps(said).encode()
    head = state_file._MAGIC + b"%08x " % zlib.crc32(text) + text
    return head.ljust(state_file._HEADER_BYTES - 1) + b"\n"


@functools.cache
def _evil() -> tuple[bytes, bytes]:
    """Return pickles that execute something, bare and as torch.save packs them."""
    bare, packed = pickle.dumps(Evil()), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", bare)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return bare, packed.getvalue()
