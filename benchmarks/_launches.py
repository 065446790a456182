"""The launches of `bench_peers.py`, each of which is one set of processes in which variants take turns.

The base launch trains the GPT with 17.4 M fp32 parameters, 8 micro-batches and 2 workers on loopback. The
other launches change one to three factors of it. Every launch that measures time contains a floor
and a control pair, so that its numbers need not be compared with those of another launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTROL = ("no_sync_view", "no_sync_view_again")
_BASE = ("floor", "ddp", *CONTROL)
_FRAMEWORKS = ("accelerate", "fabric", "trainer", "megatron")
_SAME_BYTES = (*_BASE, "no_sync", *_FRAMEWORKS, "replicate_deferred", "engine", "attach")
_SHARDED = ("fsdp2", "fsdp2_deferred", "attach_fsdp2", "replicate")
_DEFERRALS = ("fsdp2", "fsdp2_deferred", "attach_fsdp2_none", "attach_fsdp2", "attach_fsdp2_gathered")
_HOOKS = ("no_sync_bf16", "no_sync_bf16_small", "no_sync_fp16", "no_sync_powersgd")
_WIRES = (
    "engine",
    "engine_bf16",
    "engine_int8_ef",
    "attach_bf16",
    "engine_exact_slots",
)
_FEWER_BYTES = ("floor", *CONTROL, *_HOOKS, *_WIRES)
_SHARED = ("engine_shared", "attach_shared")
_DEEPSPEED = ("floor", *CONTROL, "zero0", "zero1", "engine", "attach")
_ZERO = ("zero_redundancy", "engine_zero_redundancy", "attach_zero_redundancy")
_SHARDED_STATES = (
    *("floor", *CONTROL, "engine", "attach", *_ZERO, "zero1", "fsdp2_deferred"),
    *("attach_fsdp2", "attach_fsdp2_gathered"),
)
_FEW = (*_BASE, "accelerate", "engine", "engine_bf16", "attach")
_NOT_NAIVE = ("floor", *_FEW[2:])


@dataclass(frozen=True)
class Launch:
    """One set of processes.

    Attributes:
        name: the name of the launch; its result file is `<date>-peers-<name>.json`.
        variants: names of variants of `_peers.py` and of `python -m pyengine bench`.
        model: a model of `_work.py`.
        rate: Mbit/s of every rank's link, with one rank per host; 0 means loopback.
        warm_up: rounds that are not counted.
        is_counted: whether the collectives of one more window are counted.
        kind: "time"; "memory", with a set of processes for every variant and round; or "truth", which
            compares gradients with float64 and reports losses.
    """

    name: str
    variants: tuple[str, ...]
    model: str = "gpt"
    dtype: str = "fp32"
    accumulate: int = 8
    world: int = 2
    rate: int = 0
    rounds: int = 8
    warm_up: int = 2
    kind: str = "time"
    is_counted: bool = False

    @property
    def network(self) -> str:
        """Name of the network in tables."""
        if not self.rate:
            return "loopback"
        return f"{self.rate} Mbit/s" if self.rate < 1000 else f"{self.rate / 1000:g} Gbit/s"

    @property
    def work(self) -> str:
        """Name of the model in tables."""
        machinery = ", gradients alone" if self.model.endswith("0") else ""
        name = {"gpt": "GPT", "cnn": "CNN", "small": "1000 small"}[self.model.rstrip("0").partition("-")[0]]
        return f"{name} {self.dtype}{machinery}"


_MACHINERY = (
    *(*_BASE, "no_sync", "no_sync_bf16", "accelerate", "fabric", "megatron"),
    *("engine", "engine_bf16", "attach", "attach_bf16"),
)
_OWN_SUMS = (*_MACHINERY, "engine_native_bf16", "attach_native_bf16")  # the last two sum in bf16, as DDP does
_TRUE = (
    *(*_SAME_BYTES, *_SHARDED, "attach_fsdp2_gathered", *_HOOKS, *_WIRES[1:], *_SHARED),
    *("zero0", "zero1", *_ZERO),
)
_HELD = (
    *("floor", "ddp", "no_sync", "no_sync_view", *_FRAMEWORKS, "zero0", "zero1", "fsdp2_deferred"),
    *("replicate_deferred", "no_sync_powersgd", "engine", "attach", "engine_bf16", "engine_int8_ef"),
    *("engine_exact_slots", "engine_shared", *_ZERO, "attach_fsdp2", "attach_fsdp2_gathered"),
)
_MORE_WIRES = ("engine_bf16_sum_fp32", "engine_fp8_e4m3_ef", "engine_exact")
_SLOW = ("floor", *CONTROL, "no_sync_bf16", "no_sync_powersgd", *_WIRES[:3], *_MORE_WIRES)
LAUNCHES = (
    Launch("truth", _TRUE, kind="truth", accumulate=2, rounds=8),
    Launch("base", (*_SAME_BYTES, *_SHARDED), rounds=14, is_counted=True),
    Launch("wires", (*_FEWER_BYTES, *_SHARED), rounds=14, is_counted=True),
    Launch("gbit", (*_SAME_BYTES, "fsdp2_deferred", "attach_fsdp2"), rate=1000, rounds=6),
    Launch("gbit-wires", (*_FEWER_BYTES, *_MORE_WIRES), rate=1000, rounds=12),
    Launch("sharded-4", ("floor", *CONTROL, *_DEFERRALS), world=4, rounds=4),
    Launch("gbit-sharded", ("floor", *CONTROL, *_DEFERRALS), rate=1000, rounds=4),
    Launch("sharded-states", _SHARDED_STATES, is_counted=True),
    Launch("gbit-sharded-states", _SHARDED_STATES, rate=1000, rounds=4),
    Launch("deepspeed", _DEEPSPEED, is_counted=True),
    Launch("gbit-deepspeed", _DEEPSPEED, rate=1000, rounds=12),
    Launch("memory", _HELD, rounds=3, kind="memory"),
    Launch("cnn", (*_SAME_BYTES, "engine_bf16", "engine_int8_ef"), model="cnn", rounds=20, is_counted=True),
    Launch("small", (*_SAME_BYTES, "engine_bf16"), model="small", rounds=24),
    Launch("gpt0", (*_MACHINERY, *_SHARED), model="gpt0", rounds=14),
    Launch("small0", (*_MACHINERY, "engine_shared"), model="small0", rounds=20),
    Launch("gpt0-bf16", _OWN_SUMS, model="gpt0", dtype="bf16", rounds=14),
    Launch("gbit-gpt0-bf16", _OWN_SUMS, model="gpt0", dtype="bf16", rate=1000, rounds=6),
    Launch("slow", _SLOW, rate=100, rounds=3),
    Launch("every-1", _FEW, accumulate=1, rounds=30),
    Launch("every-4", _FEW, accumulate=4, rounds=8),
    Launch("every-16", _FEW, accumulate=16, rounds=8),
    Launch("5m", _FEW, model="gpt-5m", rounds=40),
    Launch("26m", _FEW, model="gpt-26m", rounds=5),
    Launch("gbit-5m", _FEW, model="gpt-5m", rate=1000, rounds=16),
    Launch("gbit-26m", _FEW, model="gpt-26m", rate=1000, rounds=6),
    Launch("workers-4", (*_FEW, *_SHARED), world=4, rounds=5),
    Launch("gbit-workers-4", _NOT_NAIVE, world=4, rate=1000, rounds=4),
)


def shortened() -> tuple[Launch, ...]:
    """Return a few launches with few rounds, which take a few minutes."""
    chosen = ("truth", "base", "wires", "gbit", "gbit-wires", "deepspeed")
    return tuple(replace(launch, rounds=2) for launch in LAUNCHES if launch.name in chosen)
