"""Compare pyengine with the peers that send the same number of bytes.

The reasons why a peer is ahead are written by hand in this module. A peer that is ahead without such a reason
is marked in docs/numbers.md.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from _peer_results import Measured, doubt

_FP32 = (
    *("no_sync", "no_sync_view", "accelerate", "fabric", "trainer", "megatron"),
    *("replicate_deferred", "zero0", "zero1"),
)
_BF16 = ("no_sync_bf16", "no_sync_bf16_small", "no_sync_fp16")
# The peers that send the same number of bytes, by dtype of the parameters and by pyengine's variant. With
# bf16 parameters, all peers except Megatron sum and send bf16.
PAIRS = {
    "fp32": {
        "engine": _FP32,
        "attach": _FP32,
        "engine_bf16": _BF16,
        "attach_bf16": _BF16,
        "attach_fsdp2": ("fsdp2", "fsdp2_deferred"),
        "attach_fsdp2_gathered": ("no_sync_view",),
        "engine_zero_redundancy": ("zero_redundancy", "zero1"),
        "attach_zero_redundancy": ("zero_redundancy", "zero1"),
    },
    "bf16": {
        "engine_native_bf16": (*_FP32[:5], *_BF16),
        "attach_native_bf16": (*_FP32[:5], *_BF16),
        "engine_bf16": (*_FP32[:5], *_BF16),
        "attach_bf16": (*_FP32[:5], *_BF16),
        "engine": ("megatron",),
        "attach": ("megatron",),
    },
}
UNEXPLAINED = "**not explained yet**"
LEAST_WINDOWS = 6  # per launch; with fewer windows, a difference may be chance
_WAITS_FOR_UNITS = (
    "units wait for their gathers and reductions, which DDP runs in the background, and FSDP2's hooks run in "
    "each micro-batch, for each unit"
)
# Patterns of the launch and of pyengine's variant, and the reason. The first match applies.
REASONS: tuple[tuple[str, str, str], ...] = (
    ("sharded-states", "attach_fsdp2_gathered", _WAITS_FOR_UNITS),
    (
        ".*bf16",
        "(engine|attach)_bf16",
        'the peer sums micro-batches in bf16, pyengine in fp32; `accumulator="native"` also sums in bf16',
    ),
    (
        "small0",
        "attach",
        "probably chance: the peer, Accelerate, wraps DDP, and DDP itself and Fabric are level with attach",
    ),
    (
        ".*bf16",
        "(engine|attach)_native_bf16",
        (
            "the engine copies the gradients of the first micro-batch into its buckets, and the backward "
            "waits for the copies; DDP copies those of the last micro-batch while it reduces other buckets"
        ),
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One of our variants compared with one peer in one launch; `ratio` is our time divided by the peer's."""

    launch: str
    ours: str
    ratio: float
    is_lost: bool
    is_won: bool


def comparisons(results: dict[str, Measured]) -> list[Comparison]:
    """Return the comparisons of all launches that measure time, the worst ratio first."""
    found = []
    for name, one in results.items():
        if one.launch["kind"] != "time" or one.launch["rounds"] < LEAST_WINDOWS:
            continue
        for ours, peers in PAIRS[one.launch["dtype"]].items():
            found += [_compare(name, one, peer, ours) for peer in peers if {peer, ours} <= set(one.rows)]
    return sorted(found, key=lambda pair: -pair.ratio)


def _compare(name: str, one: Measured, peer: str, ours: str) -> Comparison:
    """Compare round by round; a difference counts if it exceeds the noise of the launch and of the pair."""
    ratios = one.ratios(ours, peer)
    ratio = statistics.median(ratios)
    margin = max(one.noise, doubt(ratios))
    return Comparison(name, ours, ratio, is_lost=ratio > 1 + margin, is_won=ratio < 1 - margin)


def explained(one: Comparison) -> str:
    """Return why a peer is ahead."""
    for launch, ours, why in REASONS:
        patterns = ((launch, one.launch), (ours, one.ours))
        if all(re.fullmatch(pattern, name) for pattern, name in patterns):
            return why
    return UNEXPLAINED
