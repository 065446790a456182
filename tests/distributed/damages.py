"""Every way to spoil a state: by name, what it does to the content of one, in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Content = dict[str, Any]


def _set(*path: Any, to: Any) -> Callable[[Content], None]:
    def spoil(fields: Content) -> None:
        *outer, last = path
        for name in outer:
            fields = fields[name]
        fields[last] = to(fields.get(last)) if callable(to) else to

    return spoil


def _rename(*path: str, to: str) -> Callable[[Content], None]:
    def spoil(fields: Content) -> None:
        *outer, last = path
        for name in outer:
            fields = fields[name]
        fields[to] = fields.pop(last)

    return spoil


def _parts(change: Callable[[str, Tensor], Any]) -> Callable[[Content], None]:
    """Change every part of the sum of one parameter, whatever the accumulator calls them,
    but not its flags.
    """

    def spoil(fields: Content) -> None:
        parts = fields["sums"]["last.weight"]
        for name in parts.keys() - {"nonfinite"}:
            parts[name] = change(name, parts[name])

    return spoil


def _flags(change: Callable[[Tensor], Any]) -> Callable[[Content], None]:
    def spoil(fields: Content) -> None:
        for parts in fields["sums"].values():
            parts["nonfinite"] = change(parts.get("nonfinite", torch.zeros(2, dtype=torch.uint8)))

    return spoil


def _one_flag(fields: Content) -> None:
    parts = fields["sums"]["last.weight"]
    if parts.pop("nonfinite", None) is None:
        parts["nonfinite"] = torch.zeros(2, dtype=torch.uint8)


def _sparse(shape: list[int], index: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(index)[:, None], torch.ones(1), shape, check_invariants=False)


FIELDS = (
    "window", "steps", "rank", "world_size", "identity", "accumulate", "is_between_loops", "order", "places",
    "counts", "losses", "sums", "batch_norm", "carry", "scaler", "rng",
)  # fmt: skip
WHOLE = ("window", "steps", "rank", "world_size", "accumulate")
LISTS = ("order", "places", "counts", "losses", "batch_norm")
ANY_STATE: dict[str, Callable[[Content], Any]] = {
    **{f"no {name}": lambda fields, name=name: fields.pop(name) for name in FIELDS},
    **{f"{name}=None": _set(name, to=None) for name in FIELDS},
    **{f"{name} is a word": _set(name, to="x") for name in FIELDS},
    **{f"{name}=-1": _set(name, to=-1) for name in WHOLE},
    **{f"{name}=True": _set(name, to=True) for name in WHOLE},
    **{f"{name}=1.0": _set(name, to=1.0) for name in WHOLE},
    **{f"{name} holds None": _set(name, to=[None, None]) for name in LISTS if name != "losses"},
    **{f"{name} holds words": _set(name, to=["x", "y"]) for name in LISTS},
    **{f"{name} is a tensor": _set(name, to=torch.zeros(2)) for name in FIELDS},
    "one field more": _set("more", to=1),
    "rank beyond its world": _set("rank", to=1),
    "no ranks": _set("world_size", to=0),
    "accumulate=0": _set("accumulate", to=0),
    "another accumulate": _set("accumulate", to=4),
    "a place twice": _set("places", to=[0, 0]),
    "a negative place": _set("places", to=[0, -1]),
    "a place beyond the window": _set("places", to=[0, 3]),
    "a place too much": _set("places", to=[0, 1, 2]),
    "a count of nan": _set("counts", to=[4.0, float("nan")]),
    "a count of inf": _set("counts", to=[4.0, float("inf")]),
    "a negative count": _set("counts", to=[4.0, -4.0]),
    "a count too few": _set("counts", to=[4.0]),
    "a loss too much": _set("losses", to=[1.0, 1.0, 1.0]),
    "a dropped micro-batch too much": _set("dropped", to=[False, True, False]),
    "dropped micro-batches as numbers": _set("dropped", to=[0, 1]),
    "an index twice in the order": _set("order", to=[0, 0]),
    "an unknown index in the order": _set("order", to=[9]),
    "a sum of an unknown parameter": _rename("sums", "last.weight", to="last.weihgt"),
    "parts of a sum renamed": _set(
        "sums", "last.weight", to=lambda parts: {f"{n}_": p for n, p in parts.items()}
    ),
    "a part too much": _set("sums", "last.weight", "more", to=torch.zeros(2)),
    "a sum that is a tensor": _set("sums", "last.weight", to=torch.zeros(5)),
    "a sum of one element": _parts(lambda name, part: part.flatten()[:1]),
    "a sum with an element more": _parts(lambda name, part: torch.cat([part, part[:1]])),
    "a sum of another type": _parts(lambda name, part: part.double()),
    "a sum without memory": _parts(lambda name, part: part.to("meta")),
    "a sum that is sparse": _parts(lambda name, part: part.to_sparse()),
    "flags of other micro-batches": _flags(lambda flags: flags[:1]),
    "flags without a shape": _flags(lambda flags: flags[0]),
    "flags of another type": _flags(lambda flags: flags.float()),
    "flags of one parameter only": _one_flag,
    "a gradient of an unknown parameter": _rename("carry", "last.weight", to="last"),
    "a kept gradient of one element": _set("carry", "last.weight", to=torch.ones(1)),
    "a kept gradient of another type": _set("carry", "last.weight", to=torch.ones(1, 5).double()),
    "a kept gradient with indices outside of it": _set(
        "carry", "last.weight", to=_sparse([1, 5], [0, 2**40])
    ),
    "a kept gradient of huge shape": _set("carry", "last.weight", to=_sparse([2**20, 2**20], [0, 0])),
    "a kept gradient of another layout": _set("carry", "last.weight", to=torch.eye(5).to_sparse_csr()),
    "a kept gradient that shares its elements": _set(
        "carry", "last.weight", to=torch.ones(1, 1).expand(1, 2**50)
    ),
    "no scale": lambda fields: fields["scaler"].pop("scale"),
    "a scale of nan": _set("scaler", "scale", to=float("nan")),
    "a negative scale": _set("scaler", "scale", to=-4.0),
    **{
        f"a scale of {value:.3g}": _set("scaler", "scale", to=value)
        for value in (0, 0.0, 1e300, 1e-300, 2**70)
    },
    **{
        f"{name} of {str(value)[:20]}": _set("scaler", name, to=value)
        for name, values in {
            "growth_factor": (0.5, 10**400, float("nan")),
            "backoff_factor": (0.0, -0.5, 2.0, 10**400),
            "growth_interval": (-1, 2**63, 2**70, 10**400),
            "_growth_tracker": (-1, 2**31 - 1, 2**31, 2**70),
        }.items()
        for value in values
    },
    **{f"{name}=2**{bits}": _set(name, to=2**bits) for name in WHOLE for bits in (63, 2000)},
    "a kept gradient of nan": _set("carry", "last.weight", to=torch.full((1, 5), float("nan"))),
    "a broken interval": _set("scaler", "growth_interval", to=2.5),
    "one number more in the scaler": _set("scaler", "more", to=1.0),
    "an unknown generator": _rename("rng", "torch", to="troch"),
    "no state of torch's generator": lambda fields: fields["rng"].pop("torch"),
    "torch's generator is short": _set("rng", "torch", to=lambda state: state[:1]),
    "Python's generator is a list": _set("rng", "random", to=list),
    "numpy's generator is None": _set("rng", "numpy", to=None),
    "another accumulator": _set("identity", "accumulator", to="magic"),
    "other terms": _set("identity", "terms", to=7),
    "other BatchNorms": _set("identity", "batch_norms", to=7),
    "a parameter less": _set("identity", "params", to=lambda params: params[1:]),
    "a parameter without a type": _set("identity", "params", to=lambda params: [p[:3] for p in params]),
    "parameters of other shapes": _set(
        "identity", "params", to=lambda params: [(p[0], [9], [1], p[3]) for p in params]
    ),
    "one fact more of the engine": _set("identity", "more", to=1),
}
EXACT: dict[str, Callable[[Content], Any]] = {
    "half a count": _set("counts", to=[4.0, 0.5]),
    "no tables": _set("batch_norm", to=[]),
    "a table less": _set("batch_norm", to=lambda tables: tables[:1]),
    "a row less": _set("batch_norm", to=lambda tables: [table[:1] for table in tables]),
    "a column less": _set("batch_norm", to=lambda tables: [table[:, 1:] for table in tables]),
    "tables of another type": _set("batch_norm", to=lambda tables: [table.half() for table in tables]),
    "a table without a shape": _set("batch_norm", to=lambda tables: [tables[0], tables[1][0, 0]]),
    "negative calls": _set("batch_norm", to=lambda tables: [tables[0], -tables[1]]),
}
# In the form of a good one, so that only a checksum shows the change.
HIDDEN: dict[str, Callable[[Content], Any]] = {
    "a sum deleted": lambda fields: fields["sums"].pop("last.weight"),
    "a kept gradient deleted": lambda fields: fields["carry"].pop("last.weight"),
    "another place": _set("places", to=[0, 2]),
    "another count": _set("counts", to=[4.0, 5.0]),
    "another scale": _set("scaler", "scale", to=8.0),
    "two sums exchanged": lambda fields: fields["sums"].update(
        {"first.bias": fields["sums"]["last.weight"], "last.weight": fields["sums"]["first.bias"]}
    ),
    "another state of Python's generator": _set("rng", "random", to=lambda _: random.Random(1).getstate()),
    "not between loops": _set("is_between_loops", to=True),
}
# Not the content: what stands round it.
OUTSIDE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no version": lambda state: state.pop("version"),
    "another version": _set("version", to=3),
    "no window": lambda state: state.pop("window"),
    "another window": _set("window", to=2),
    "other steps": _set("steps", to=1),
    "no part": lambda state: state.pop("rank 0 of 1"),
    "a part that is None": _set("rank 0 of 1", to=None),
    "a part without a checksum": _set("rank 0 of 1", to=lambda part: part[:1]),
    "a part of a rank with an escape": _rename("rank 0 of 1", to="\x1b[2J"),
    "an escape for a version": _set("version", to="\x1b[2J"),
    "a part of another rank": _rename("rank 0 of 1", to="rank 1 of 2"),
    "something else beside it": _set("epoch", to=3),
}
