"""Compare runs: first by digests, then the tensors of the first step that differs by elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

from pyengine.cli.verify.probe import KINDS, Trace, digest

NORM = ("norm", "norm")
Tensors = Mapping[tuple[str, str], Tensor]  # by kind and name


@dataclass(frozen=True)
class Difference:
    """The first entry of a run that differs from the reference."""

    step: int
    kind: str
    name: str
    rank: int  # the lowest rank on which it differs
    counts: dict[str, tuple[int, int]]  # (entries that differ, entries) of that step and rank, by kind
    texts: tuple[str | None, str | None]  # of the reference and of the run; digests, but for a "window"


@dataclass(frozen=True)
class Change:
    """How a run's whole gradient differs from that of the reference."""

    relative: float  # norm of the difference over the norm of the reference
    # The ratio of the norms before clipping where they are recorded, else the least-squares factor from the
    # reference to the run.
    factor: float
    rest: float  # norm of the residual of the least-squares factor, over the norm of the run
    epsilon: float  # the largest of the dtypes


def first_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Return where the ranks of a run first differ from the reference; None if they do not."""
    found = []
    for rank, trace in enumerate(ranks):
        for position, key in enumerate({**reference.entries, **trace.entries}):
            if reference.entries.get(key) != trace.entries.get(key):
                step, kind, _ = key
                found.append((step, list(KINDS).index(kind), position, rank, key))
    if not found:
        return None
    *_, rank, (step, kind, name) = min(found)
    key = (step, kind, name)
    return Difference(
        step,
        kind,
        name,
        rank,
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


def compare(ours: Tensor | None, theirs: Tensor | None) -> str:
    """Describe how a tensor of a run differs from that of the reference; empty if their bits are equal."""
    if ours is None or theirs is None:
        return f"The tensor is missing in {'the reference' if ours is None else 'the run'}."
    if digest(ours) == digest(theirs):
        return ""
    try:
        assert_close(theirs, ours, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        title, *lines = filter(None, str(error).splitlines())
        return "; ".join(lines or [title]).rstrip(".") + "."
    return "The values are equal: the signs of zeros or the bits of nans differ."


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
