"""Compare runs: first by digests, then the tensors of the first step that differs by elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.cli.verify.probe import KINDS, Trace

NORM = ("norm", "norm")
Tensors = Mapping[tuple[str, str], Tensor]  # by kind and name


@dataclass(frozen=True)
class Difference:
    """The first entry of a run that differs from the reference.

    Attributes:
        rank: the lowest rank on which it differs.
        agrees: whether the entry is the same on all ranks of the run.
        counts: (entries that differ, entries) of that step and rank, by kind.
        texts: the entry in the reference and in the run: digests, except for the kind "window".
    """

    step: int
    kind: str
    name: str
    rank: int
    agrees: bool
    counts: dict[str, tuple[int, int]]
    texts: tuple[str | None, str | None]


@dataclass(frozen=True)
class Elements:
    """How two tensors differ, bit by bit.

    Attributes:
        index: flat index of the first element that differs.
        values: this element in the reference and in the run; None if a tensor is missing, or shapes or dtypes
            differ.
        differ, total: numbers of elements.
        largest: largest difference of two elements.
    """

    index: int
    values: tuple[float, float] | None
    about: tuple[str, str]
    differ: int
    total: int
    largest: float


@dataclass(frozen=True)
class Change:
    """How a run's whole gradient differs from that of the reference.

    Attributes:
        relative: norm of the difference over the norm of the reference.
        factor: the ratio of the norms before clipping where they are recorded, else the least-squares factor
            from the reference to the run.
        rest: norm of the residual of the least-squares factor, over the norm of the run.
        epsilon: the largest epsilon of the dtypes.
    """

    relative: float
    factor: float
    rest: float
    epsilon: float


def first_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Return where the ranks of a run first differ from the reference; None if they do not."""
    found = []
    for rank, trace in enumerate(ranks):
        for position, key in enumerate({**reference.entries, **trace.entries}):
            if reference.entries.get(key) != trace.entries.get(key):
                step, kind, _ = key
                found.append((step, KINDS.index(kind), position, rank, key))
    if not found:
        return None
    *_, rank, (step, kind, name) = min(found)
    key = (step, kind, name)
    return Difference(
        step,
        kind,
        name,
        rank,
        agrees=len({trace.entries.get(key) for trace in ranks}) == 1,
        counts=_counts(reference, ranks[rank], step),
        texts=(reference.entries.get(key), ranks[rank].entries.get(key)),
    )


def _counts(reference: Trace, trace: Trace, step: int) -> dict[str, tuple[int, int]]:
    ours, theirs = reference.entries, trace.entries
    counts = {}
    for kind in KINDS:
        keys = [key for key in {**ours, **theirs} if key[:2] == (step, kind)]
        if keys:
            counts[kind] = sum(ours.get(key) != theirs.get(key) for key in keys), len(keys)
    return counts


def compare(ours: Tensor | None, theirs: Tensor | None) -> Elements | None:
    """Compare a tensor of the reference with that of a run; return None if they are equal."""
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return Elements(0, None, (_about(ours), _about(theirs)), 0, 0, 0.0)
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    differs = (_bits(ours) != _bits(theirs)).any(1)
    if not bool(differs.any()):
        return None
    index = int(differs.nonzero()[0])
    largest = (ours.double() - theirs.double()).abs().max()
    values = float(ours[index]), float(theirs[index])
    return Elements(
        index, values, (_about(ours), _about(theirs)), int(differs.sum()), ours.numel(), float(largest)
    )


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _about(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def change(ours: Tensors, theirs: Tensors) -> Change | None:
    """Compare whole gradients; return None if one of them is empty, zero or not finite."""
    keys = [
        key for key in ours if key[0] == "gradient" and key in theirs and ours[key].shape == theirs[key].shape
    ]
    pairs = [(ours[key].double().reshape(-1), theirs[key].double().reshape(-1)) for key in keys]
    ours_2 = sum(float(a @ a) for a, _ in pairs)
    theirs_2 = sum(float(b @ b) for _, b in pairs)
    if not 0 < ours_2 * theirs_2 < float("inf"):
        return None
    factor = sum(float(a @ b) for a, b in pairs) / ours_2
    rest = sum(float((b - factor * a).square().sum()) for a, b in pairs)
    difference = sum(float((b - a).square().sum()) for a, b in pairs)
    epsilon = max(torch.finfo(ours[key].dtype).eps for key in keys)
    if NORM in ours and NORM in theirs and float(ours[NORM]) > 0:
        scale = float(theirs[NORM]) / float(ours[NORM])
    else:
        scale = factor
    return Change((difference / ours_2) ** 0.5, scale, (rest / theirs_2) ** 0.5, epsilon)
