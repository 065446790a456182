"""The likely cause of a difference, by a few rules in a fixed order, and what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyengine.cli.verify.compare import Change, Difference
from pyengine.cli.verify.probe import START


@dataclass(frozen=True)
class Facts:
    """What is known of a difference.

    Attributes:
        first: where the runs part.
        repeats: whether both runs are of the same world size and settings.
        came_back: whether the same bits came again when the runs were repeated to look at them.
        threads: that the runs ended with.
        micro_batches: in a window.
        gradient: how the whole gradient of that step differs, if it does.
    """

    first: Difference
    repeats: bool
    came_back: bool
    threads: tuple[int, ...]
    micro_batches: int
    gradient: Change | None

    def differs(self, kind: str) -> bool:
        """Whether anything of a kind differs in the first step."""
        return self.first.counts.get(kind, (0, 0))[0] > 0


def causes(facts: Facts) -> list[tuple[str, str]]:
    """Return (name, text) of what is likely to be wrong, the first cause first; never empty."""
    for rule in _ALONE:
        alone = rule(facts)
        if alone is not None:
            return [alone]
    # A gradient does not depend on running statistics: both may be wrong.
    found = [cause for rule in (_buffers, _after_buffers) if (cause := rule(facts)) is not None]
    return found or [("unknown", "No rule knows this difference.")]


def _threads(facts: Facts) -> tuple[str, str] | None:
    if len(set(facts.threads)) == 1:
        return None
    seen = ", ".join(str(number) for number in sorted(set(facts.threads)))
    return "threads", (
        f"The runs ended with different numbers of threads ({seen}), which changes the order of sums: call "
        "torch.set_num_threads with the same number everywhere, or not at all."
    )


def _unseeded(facts: Facts) -> tuple[str, str] | None:
    if facts.first.step != START:
        return None
    if facts.repeats:
        return (
            "seed",
            "The model starts with other values each time: call pe.seed_everything before it is built.",
        )
    return "initial values", (
        "The model starts with other values: seed alike in every world size and on every rank before it is "
        "built, and copy rank 0's values where it is not wrapped (GradSync and DDP do)."
    )


def _nondeterminism(facts: Facts) -> tuple[str, str] | None:
    if not facts.repeats and facts.came_back:
        return None
    return "nondeterminism", (
        "The same run gives other bits each time, whatever the world size: look for randomness that is not "
        "seeded (pe.seed_everything, pe.micro_batch_rng), the order of a set or of finished workers, or "
        "operations that are not deterministic (torch.use_deterministic_algorithms finds them)."
    )


def _windows(facts: Facts) -> tuple[str, str] | None:
    if facts.first.kind != "window":
        return None
    return "windows", (
        "The windows do not hold the same: deal the same micro-batches to every world size "
        "(pe.WindowSampler), and let each rank accumulate its share of them "
        "(accumulate=sampler.accumulate)."
    )


def _buffers(facts: Facts) -> tuple[str, str] | None:
    if facts.first.kind != "buffer":
        return None
    if facts.first.name.endswith(("running_mean", "running_var", "num_batches_tracked")):
        return "BatchNorm", (
            "Running statistics are averages over the micro-batches that a rank has seen, which are other "
            "ones in every world size: make the engine over the module itself (not its parameters) with "
            'accumulator="exact", which '
            "replays them in the window's order, or use a norm without them (GroupNorm, LayerNorm)."
        )
    return "buffers", (
        "A buffer is written by forward, from the micro-batches that this rank has seen: gather what it is "
        "made of over the whole window, in the window's order."
    )


def _after_buffers(facts: Facts) -> tuple[str, str] | None:
    """The first difference in what comes after the forwards: gradients, else the norm,
    else parameters and state.
    """
    rules = {"gradient": _gradient, "norm": _norm, "parameter": _optimizer, "state": _optimizer}
    return next((rule(facts) for kind, rule in rules.items() if facts.differs(kind)), None)


def _gradient(facts: Facts) -> tuple[str, str]:
    gradient = facts.gradient
    differ, total = facts.first.counts["gradient"]
    of = f"{differ} of {total} gradients differ"
    if gradient is not None:
        # Sums of M terms round by about M halves of epsilon; 16 leaves room for terms that cancel.
        rounding = min(0.05, 8 * facts.micro_batches * gradient.epsilon)
        if gradient.relative <= rounding and abs(gradient.factor - 1) <= rounding:
            return "sums", (
                f"In this step {of} by rounding (together {gradient.relative:.1e} of the gradient): sums "
                "depend on how the window is split among ranks. "
                'Sum with accumulator="exact"; leave every division to the '
                "engine (loss sums with their count)."
            )
        if gradient.rest <= rounding:
            return "divisor", (
                f"The gradient (before clipping) is {gradient.factor:.6g} times as large: something divides "
                "by the world size or by a rank's own number of micro-batches. Give backward the loss's "
                "sum with its count, and divide nowhere."
            )
    size = (
        "" if gradient is None else f" (together {gradient.relative:.1e} of the gradient, more than rounding)"
    )
    return "randomness", (
        f"In this step {of}{size}: data, randomness or state depends on the rank or on what it did before, "
        "not on the micro-batch. Deal data with pe.WindowSampler, put pe.micro_batch_rng round each "
        "micro-batch, and keep nothing from one forward to the next."
    )


def _norm(facts: Facts) -> tuple[str, str]:
    return "norm", (
        "Gradients agree and their norm does not: it is summed in an order that depends on ranks or "
        "buckets, or before the gradients were complete. Use sync.clip_grad_norm_ or sync.grad_norm."
    )


def _optimizer(facts: Facts) -> tuple[str, str]:
    if facts.first.agrees:
        return "optimizer", (
            "Gradients agree, and the optimizer makes other values of them: its settings (learning rate, "
            "schedule) depend on the world size, or its kernel on how parameters are cut. Derive settings "
            "from the global batch."
        )
    return "optimizer by rank", (
        "Gradients agree, and ranks make other values of them: the optimizer's settings depend on the "
        "rank, or something writes to parameters on some ranks only. Make the optimizer alike on every "
        "rank."
    )


_ALONE: tuple[Callable[[Facts], tuple[str, str] | None], ...] = (
    _threads,
    _unseeded,
    _nondeterminism,
    _windows,
)
