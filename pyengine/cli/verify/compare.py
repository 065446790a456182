"""Compare runs by digests, then by elements in the first step that differs, and find the likely cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

from pyengine.cli.verify.probe import KINDS, START, Trace, digest

NORM = ("norm", "norm")
Tensors = Mapping[tuple[str, str], Tensor]  # by kind and name


@dataclass(frozen=True)
class Difference:
    """The first recorded entry of a run that differs from the reference."""

    step: int
    kind: str
    name: str
    rank: int  # The lowest rank on which the entry differs.
    counts: dict[str, tuple[int, int]]  # Numbers of (differing, all) entries of this step and rank, by kind.
    texts: tuple[str | None, str | None]  # Entries of reference and run: digests, or text for a "window".


@dataclass(frozen=True)
class Change:
    """The difference between a run's full gradient and the reference gradient."""

    relative: float  # Norm of the difference, divided by the norm of the reference.
    # The ratio of the norms before clipping if they are recorded, otherwise the least-squares factor from the
    # reference to the run.
    factor: float
    rest: float  # Norm of the residual of the least-squares fit, divided by the norm of the run.
    epsilon: float  # Largest machine epsilon of the gradients' dtypes.


def first_difference(reference: Trace, ranks: Sequence[Trace]) -> Difference | None:
    """Return the first difference between the ranks of a run and the reference; None if they are equal."""
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
    """Describe how a tensor of a run differs from the reference's; return "" if their bits are equal."""
    if ours is None or theirs is None:
        return f"The tensor is missing from {'the reference' if ours is None else 'the run'}."
    if digest(ours) == digest(theirs):
        return ""
    try:
        assert_close(theirs, ours, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        title, *lines = filter(None, str(error).splitlines())
        return "; ".join(lines or [title]).rstrip(".") + "."
    return "The values are equal, but the signs of zeros or the bits of nans differ."


def change(ours: Tensors, theirs: Tensors) -> Change | None:
    """Compare the full gradients of two runs; return None if either gradient is empty, zero or not finite."""
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


# ---- likely causes ----


def causes(
    first: Difference, *, repeats: bool, came_back: bool, micro_batches: int, gradient: Change | None
) -> list[tuple[str, str]]:
    """Return the likely causes as pairs (name, text), most likely first; never empty.

    Args:
        first: the first difference between the runs.
        repeats: whether both runs have the same world size and settings.
        came_back: whether both runs gave the same bits when they were repeated.
        micro_batches: number of micro-batches in a window.
        gradient: the difference of the full gradients in this step; None if they cannot be compared.
    """
    differs = {kind for kind, (differ, _) in first.counts.items() if differ}
    if first.step == START:
        return _known("seed" if repeats else "initial values")
    if repeats or not came_back:
        return _known("nondeterminism")
    if first.kind == "window":
        return _known("windows")
    found = []
    # Running statistics do not affect gradients, so gradients and statistics can differ independently.
    if first.kind == "buffer":
        found += _known("BatchNorm" if first.name.endswith(_STATISTICS) else "buffers")
    if "gradient" in differs:
        found.append(_gradient(first, micro_batches, gradient))
    elif "norm" in differs:
        found += _known("norm")
    elif differs & {"parameter", "state"}:
        found += _known("optimizer")
    return found or _known("unknown")


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_TEXTS = {
    "seed": "The initial parameters differ in each run: call pe.seed_everything before the model is built.",
    "initial values": "The initial parameters differ: use the same seed in every world size and on every "
    "rank before the model is built; a model in neither GradSync nor DDP needs a broadcast of rank 0's "
    "parameters.",
    "nondeterminism": "The same run gives different bits each time, whatever the world size: look for "
    "randomness without a seed (pe.seed_everything, pe.micro_batch_rng), the order of a set or of finished "
    "workers, or nondeterministic operations (torch.use_deterministic_algorithms finds them).",
    "windows": "The windows have different items: use the same micro-batches in every world size "
    "(pe.WindowSampler), and let each rank accumulate its share of them (accumulate=sampler.accumulate).",
    "BatchNorm": "Running statistics are averages over the micro-batches of one rank, which depend on the "
    "world size. Training does not read them: where nothing else differs, parameters have the same bits. "
    "Evaluate with the statistics of one rank, or use a norm without such statistics (GroupNorm, LayerNorm).",
    "buffers": "The forward writes a buffer from the micro-batches of its rank: gather its inputs over the "
    "whole window, in the window's order.",
    "norm": "The gradients are equal, but their norms are not: the norm is summed in an order that depends "
    "on ranks or buckets, or before the gradients are complete. Use sync.clip_grad_norm_ or sync.grad_norm.",
    "optimizer": "The gradients are equal, but the optimizer computes different values: its settings "
    "(learning rate, schedule) depend on the rank or the world size, or its kernel on the split of "
    "parameters, or parameters are written on some ranks only. Derive the settings from the global batch.",
    "unknown": "No rule explains this difference.",
}


def _known(name: str) -> list[tuple[str, str]]:
    return [(name, _TEXTS[name])]


def _gradient(first: Difference, micro_batches: int, gradient: Change | None) -> tuple[str, str]:
    differ, total = first.counts["gradient"]
    of = f"{differ} of {total} gradients differ"
    if gradient is not None:
        # The rounding error of a sum of M terms is about M / 2 epsilons; 16 times as much allows for terms
        # that cancel.
        rounding = min(0.05, 8 * micro_batches * gradient.epsilon)
        if gradient.relative <= rounding and abs(gradient.factor - 1) <= rounding:
            return "sums", (
                f"In this step {of} by rounding (together {gradient.relative:.1e} of the gradient): sums "
                "depend on how the window is split among ranks. "
                'Use accumulator="exact", and leave every division to the '
                "engine (loss sums with their count)."
            )
        if gradient.rest <= rounding:
            return "divisor", (
                f"The gradient (before clipping) is {gradient.factor:.6g} times as large: something divides "
                "by the world size or by a rank's own number of micro-batches. Pass the sum of the loss and "
                "its count to sync.backward, and do not divide."
            )
    size = (
        "" if gradient is None else f" (together {gradient.relative:.1e} of the gradient, more than rounding)"
    )
    return "randomness", (
        f"In this step {of}{size}: data, randomness or state depends on the rank or its history, not on the "
        "micro-batch. Use pe.WindowSampler for the data, pe.micro_batch_rng around each micro-batch, and no "
        "state between forwards."
    )
