"""The state of an engine between two windows, as plain data.

In a state dict a snapshot has the form `{"version", "window", "steps", "rank 0 of 2": (content,)}`. The key
contains the rank because torch.distributed.checkpoint treats equal keys of different ranks as copies. The
content is in a tuple because torch.distributed.checkpoint saves and loads a tuple as a unit.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.slots import dense_strides

VERSION = 3
PART = re.compile(r"rank (0|[1-9]\d{0,17}) of ([1-9]\d{0,17})")


@dataclass(frozen=True)
class Identity:
    """The properties of an engine that must be equal in every snapshot that it loads."""

    accumulator: str
    # For exact sums, the number of terms in a full window over all ranks, which determines the sum's grid;
    # otherwise None.
    terms: int | None
    params: list[tuple[str, list[int], list[int], str]]  # Name, shape, strides and dtype.
    run: int  # The number of micro-batches in one term of the sum.


@dataclass
class Snapshot:
    """The state of a training run on one rank, between two windows."""

    window: int  # The number of completed windows.
    steps: int  # The number of optimizer steps that changed parameters.
    rank: int
    world_size: int
    identity: Identity
    is_between_loops: bool = False  # Whether a loop over `windows` had ended before the save.
    order: list[int] = field(default_factory=list)  # The order of the buckets; see `Reducer.order`.
    # Gradients that are carried into the next window: the tensors of this rank, by parameter name.
    carry: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)  # Empty without a loss scaler.
    # The rounding errors of narrow wires on this rank, which are added to a later window, by parameter name.
    # Each is a float32 tensor of shape `[numel]`, in the parameter's storage order.
    residuals: dict[str, Tensor] = field(default_factory=dict)
    # The state that metrics carry from window to window, by field of the `StepRecord`.
    measured: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)  # states of the random generators, by name

    @property
    def owner(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as tensors and plain values, for `torch.load` with `weights_only=True`."""
        content = {name: getattr(self, name) for name in _CONTENT}
        content["identity"] = dict(vars(self.identity))
        return {"version": VERSION, "window": self.window, "steps": self.steps, self.owner: (content,)}

    @classmethod
    def read(cls, state: Any) -> Snapshot:
        """Read a state dict that `to_dict` has returned; raise ValueError for any other object."""
        if not isinstance(state, dict):
            raise ValueError(f"state is a {type(state).__name__}: {_NEED}")  # noqa: TRY004 - from a file
        version = state.get("version")
        if type(version) is int and version in (1, 2):
            raise ValueError(
                "start the engine without this state, after loading parameters and optimizer: the state is "
                f"from an earlier pyengine (version {version}), which saved different values"
            )
        if version != VERSION:
            raise ValueError(f"state is version {reprlib.repr(version)}: {_NEED}")
        named = [(name, PART.fullmatch(name)) for name in state if isinstance(name, str)]
        owners = [(name, match) for name, match in named if match is not None]
        if len(owners) != 1 or len(state) != len(_POSITION) + 2 or not _POSITION.keys() < state.keys():
            raise ValueError(
                f"state has {reprlib.repr(sorted(map(str, state)))}: {_NEED}, with one rank's part"
            )
        name, match = owners[0]
        part = state[name]
        content = part[0] if isinstance(part, tuple | list) and len(part) == 1 else None
        if not isinstance(content, dict):
            raise ValueError(f"state has {name!r}, a {type(part).__name__}: {_NEED}")  # noqa: TRY004
        if differ := sorted(_CONTENT.keys() ^ content.keys(), key=str):
            texts = [
                f"{reprlib.repr(key)} {'is unexpected' if key in content else 'is missing'}" for key in differ
            ]
            raise ValueError(f"state has the wrong contents ({', '.join(texts[:5])}): {_NEED}")
        values = {**content, **{key: state[key] for key in _POSITION}}
        wrong = [
            f"state has {key}={reprlib.repr(values[key])}, expected {need}"
            for key, (is_one, need) in (_POSITION | _CONTENT).items()
            if not is_one(values[key])
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        params = [tuple(param) for param in values["identity"]["params"]]
        values["identity"] = Identity(**{**values["identity"], "params": params})
        return cls(**values, rank=int(match[1]), world_size=int(match[2]))


_NEED = f"expected what sync.state_dict() returned, version {VERSION}"


def identify(
    accumulator: str, terms: int, run: int, names: Sequence[str], params: Sequence[Parameter]
) -> Identity:
    described = [
        (name, list(p.shape), list(dense_strides(p)), str(p.dtype).removeprefix("torch."))
        for name, p in zip(names, params, strict=True)
        if p.requires_grad
    ]
    return Identity(accumulator, terms if accumulator == "exact" else None, described, run)


# ---- the required type of every field, for any engine ----


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return type(value) is list and all(map(is_one, value))


def _is_dict_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and is_one(item) for name, item in value.items()
    )


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
    )


def _is_param(value: Any) -> bool:
    if not (type(value) in (tuple, list) and len(value) == 4):
        return False
    name, shape, strides, dtype = value
    return (
        isinstance(name, str)
        and isinstance(dtype, str)
        and _is_list_of(shape, _is_whole)
        and _is_list_of(strides, _is_whole)
    )


def _is_identity(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"accumulator", "terms", "params", "run"}
        and isinstance(value["accumulator"], str)
        and (value["terms"] is None or _is_whole(value["terms"], 1))
        and _is_list_of(value["params"], _is_param)
        and _is_whole(value["run"], 1)
    )


_Kind = tuple[Callable[[Any], bool], str]
_TENSORS: _Kind = (lambda value: _is_dict_of(value, _is_dense), "tensors by name")
_POSITION: dict[str, _Kind] = dict.fromkeys(("window", "steps"), (_is_whole, "a whole number"))
_CONTENT: dict[str, _Kind] = {
    "identity": (_is_identity, "a description of the engine"),
    "is_between_loops": (lambda value: type(value) is bool, "True or False"),
    "order": (
        lambda value: _is_list_of(value, _is_whole) and len(set(value)) == len(value),
        "a list of whole numbers, all different",
    ),
    "carry": _TENSORS,
    "scaler": (lambda value: _is_dict_of(value, lambda item: type(item) in (int, float)), "numbers by name"),
    "residuals": _TENSORS,
    "measured": _TENSORS,
    "rng": (lambda value: _is_dict_of(value, lambda _: True), "states by generator"),
}
