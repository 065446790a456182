"""The likely cause of a difference and its remedy, by a few rules in a fixed order."""

from __future__ import annotations

from pyengine.cli.verify.compare import Change, Difference
from pyengine.cli.verify.probe import START


def causes(
    first: Difference, *, repeats: bool, came_back: bool, micro_batches: int, gradient: Change | None
) -> list[tuple[str, str]]:
    """Return (name, text) of the likely causes, the likeliest first; never empty.

    Args:
        first: where the runs first differ.
        repeats: whether both runs have the same world size and settings.
        came_back: whether both runs had the same bits again when they were repeated.
        micro_batches: in a window.
        gradient: how the whole gradient of that step differs, if it does.
    """
    differs = {kind for kind, (differ, _) in first.counts.items() if differ}
    if first.step == START:
        return _known("seed" if repeats else "initial values")
    if repeats or not came_back:
        return _known("nondeterminism")
    if first.kind == "window":
        return _known("windows")
    found = []
    # A gradient does not depend on running statistics: both can be wrong independently.
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
    "nondeterminism": "The same run has other bits each time, whatever the world size: look for randomness "
    "without a seed (pe.seed_everything, pe.micro_batch_rng), the order of a set or of finished workers, or "
    "nondeterministic operations (torch.use_deterministic_algorithms finds them).",
    "windows": "The windows have different items: use the same micro-batches in every world size "
    "(pe.WindowSampler), and let each rank accumulate its share of them (accumulate=sampler.accumulate).",
    "BatchNorm": "Running statistics are averages over the micro-batches of a rank, which depend on the "
    'world size: make the engine over the module itself (not its parameters) with accumulator="exact", which '
    "replays them in the window's order, or use a norm without them (GroupNorm, LayerNorm).",
    "buffers": "The forward writes a buffer from the micro-batches of its rank: gather its inputs over the "
    "whole window, in the window's order.",
    "norm": "The gradients are equal and their norm is not: it is summed in an order that depends on ranks "
    "or buckets, or before the gradients are complete. Use sync.clip_grad_norm_ or sync.grad_norm.",
    "optimizer": "The gradients are equal and the optimizer computes other values: its settings (learning "
    "rate, schedule) depend on the rank or the world size, or its kernel on the split of parameters, or "
    "parameters are written on some ranks only. Derive the settings from the global batch.",
    "unknown": "No rule knows this difference.",
}


def _known(name: str) -> list[tuple[str, str]]:
    return [(name, _TEXTS[name])]


def _gradient(first: Difference, micro_batches: int, gradient: Change | None) -> tuple[str, str]:
    differ, total = first.counts["gradient"]
    of = f"{differ} of {total} gradients differ"
    if gradient is not None:
        # A sum of M terms rounds by about M / 2 epsilons; 16 times that allows for terms that cancel.
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
