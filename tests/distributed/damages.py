"""Every way to damage a state: functions by name, which change its content in place."""

from __future__ import annotations

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


def _sparse(shape: list[int], index: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(index)[:, None], torch.ones(1), shape, check_invariants=False)


FIELDS = ("identity", "is_between_loops", "order", "carry", "scaler", "residuals", "measured", "rng")
ANY_STATE: dict[str, Callable[[Content], Any]] = {
    **{f"no {name}": lambda fields, name=name: fields.pop(name) for name in FIELDS},
    **{f"{name}=None": _set(name, to=None) for name in FIELDS},
    **{f"{name} is a word": _set(name, to="x") for name in FIELDS},
    **{f"{name} is a tensor": _set(name, to=torch.zeros(2)) for name in FIELDS},
    "order holds None": _set("order", to=[None, None]),
    "order holds words": _set("order", to=["x", "y"]),
    "one field more": _set("more", to=1),
    "an index twice in the order": _set("order", to=[0, 0]),
    "an unknown index in the order": _set("order", to=[9]),
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
    "a residual of an unknown parameter": _rename("residuals", "last.weight", to="last"),
    "a residual of one element": _set("residuals", "last.weight", to=torch.ones(1)),
    "a residual of another type": _set("residuals", "last.weight", to=torch.ones(5).double()),
    "a residual of inf": _set("residuals", "last.weight", to=torch.full((5,), float("inf"))),
    "a residual without memory": _set("residuals", "last.weight", to=torch.ones(5, device="meta")),
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
    "a parameter less": _set("identity", "params", to=lambda params: params[1:]),
    "a parameter without a type": _set("identity", "params", to=lambda params: [p[:3] for p in params]),
    "parameters of other shapes": _set(
        "identity", "params", to=lambda params: [(p[0], [9], [1], p[3]) for p in params]
    ),
    "one fact more of the engine": _set("identity", "more", to=1),
}
# Changes outside of the content of a rank's part.
OUTSIDE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no version": lambda state: state.pop("version"),
    "a later version": _set("version", to=4),
    "an earlier version": _set("version", to=2),
    "no part": lambda state: state.pop("rank 0 of 1"),
    "a part that is None": _set("rank 0 of 1", to=None),
    "a part of two": _set("rank 0 of 1", to=lambda part: part * 2),
    "a part of a rank with an escape": _rename("rank 0 of 1", to="\x1b[2J"),
    "an escape for a version": _set("version", to="\x1b[2J"),
    "a part of another rank": _rename("rank 0 of 1", to="rank 1 of 1"),
    "a part of no ranks": _rename("rank 0 of 1", to="rank 0 of 0"),
    "something else beside it": _set("epoch", to=3),
    **{f"no {name}": lambda state, name=name: state.pop(name) for name in ("window", "steps")},
    **{
        f"{name}={str(value)[:9]}": _set(name, to=value)
        for name in ("window", "steps")
        for value in (-1, True, 1.0, "x", None, 2**63, 2**2000)
    },
}
