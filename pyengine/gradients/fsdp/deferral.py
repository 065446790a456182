"""Choose when each FSDP2 unit of a model communicates, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.settings import Settings

# [Note: order of collectives in a window] in engine/engine.py lists the collectives of each mode.
MODES = ("all", "outer", "none")
Defer = str | Mapping[str, str]


@dataclass(frozen=True)
class Deferral:
    """The arguments of `attach` that control deferred communication."""

    # One mode for all units, or a dict from unit names to modes. Units that are not in the dict use "all".
    defer: Defer = "all"
    budget_mb: float | None = None  # MiB per rank for deferred communication; if None, `defer` is used.

    def __str__(self) -> str:
        given = self.defer if isinstance(self.defer, str) else dict(self.defer)
        return f"defer={given!r}, defer_budget_mb={self.budget_mb}"


def choose(units: Sequence[Unit], deferral: Deferral) -> None:
    """Choose `mode` and `keeps` for every unit: when it reduces, and whether it stays unsharded.

    Within a budget, unsharded parameters have priority over unsharded sums. Over a window of A micro-batches,
    unsharded parameters save 2A - 1 all-gathers, while unsharded sums save A - 1 reductions, which move the
    same number of bytes per element as all-gathers. The saving per byte is equal for all units, so the budget
    goes to the first units, whose communication overlaps least. The first forward has to wait for the
    all-gather of these units, and their gradients are complete only at the end of the backward.
    """
    if deferral.budget_mb is None:
        for unit in units:
            defer = deferral.defer
            unit.mode = defer if isinstance(defer, str) else defer.get(unit.name, "all")
        return
    left = deferral.budget_mb * 2**20
    for unit in units:
        unit.keeps = unit.is_sharded and unit.gathered_bytes <= left
        left -= unit.gathered_bytes if unit.keeps else 0
    for unit in units:
        if unit.sum_bytes <= left:
            unit.mode = "all"
            left -= unit.sum_bytes
        else:
            unit.mode = "outer" if unit.has_replicas_of_shards else "none"


def problems_of_deferral(units: Sequence[Unit], deferral: Deferral, settings: Settings) -> list[str]:
    """Return error messages for invalid values of `defer` and `defer_budget_mb`."""
    if settings.problems():
        return []  # other code reports invalid values
    defer, budget = deferral.defer, deferral.budget_mb
    if budget is not None and (not isinstance(budget, Real) or isinstance(budget, bool) or not budget >= 0):
        return [
            f"defer_budget_mb={budget!r}: expected a size of at least 0 in MiB; math.inf defers everything"
        ]
    if budget is not None and defer != "all":
        return [f"{deferral}: the budget chooses the units to defer; pass defer or defer_budget_mb, not both"]
    if settings.kind == "exact" and (defer, budget) != ("all", None):
        return [f"{deferral}: accumulator='exact' holds unsharded sums in every window; leave both out"]
    modes = {unit.name: defer for unit in units} if isinstance(defer, str) else defer
    if not isinstance(modes, Mapping) or any(mode not in MODES for mode in modes.values()):
        return [
            f"defer={defer!r}: expected one of {', '.join(map(repr, MODES))}, or a dict from units to these"
        ]
    known = {unit.name: unit for unit in units}
    unknown = [name for name in modes if name not in known]
    if unknown:
        return [f"defer has {unknown[0]!r}, which is not a unit of the model: the units are {list(known)}"]
    choose(units, deferral)
    return [text for unit in units for text in _choice_problems(unit, settings)]


def _choice_problems(unit: Unit, settings: Settings) -> Iterator[str]:
    """Yield the reasons why a unit does not support the chosen mode."""
    if unit.mode == "outer" and not unit.has_replicas_of_shards:
        yield (
            f"defer='outer' for unit {unit.name!r}, which has no replicas of shards (they need a "
            "mesh of two dimensions): use 'all' or 'none'"
        )
    narrow = any(p.dtype.itemsize < torch.float32.itemsize for p in unit.params if p.requires_grad)
    if unit.mode == "none" and narrow and settings.kind == "fp32":
        yield (
            f"defer='none' for unit {unit.name!r}, whose parameters have a narrow dtype: torch sums reduced "
            "gradients in that dtype, but accumulator='fp32' asks for float32; keep float32 parameters, with "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    if unit.mode != "all" and settings.wire.keeps_residual and unit.narrows(settings.wire):
        yield (
            f"wire={settings.wire} for unit {unit.name!r}, which sends gradients before the window's count "
            f"is known (defer={unit.mode!r}), while residuals belong to mean gradients: use defer='all', or "
            "the wire without ErrorFeedback"
        )
    largest = torch.finfo(settings.wire.dtype).max
    if unit.mode != "all" and unit.narrows(settings.wire) and largest < torch.finfo(torch.bfloat16).max:
        yield (
            f"wire={settings.wire} for unit {unit.name!r}, which sends gradients before the window's count "
            f"is known (defer={unit.mode!r}), and undivided gradients may exceed {largest:g}: use "
            "defer='all', or pe.wire.BF16()"
        )
