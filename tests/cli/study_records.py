"""Synthetic runs for the tests of `study`: seconds are powers of two, so that all results are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyengine.cli.study.analysis import Analysis, analyse
from pyengine.cli.study.grid import WARM_UP_STEPS
from pyengine.cli.study.probe import Run
from pyengine.cli.study.store import Record

STEPS = 16  # measured steps


def asked(
    target: str,
    beats: Path | None = None,
    *,
    workers: int = 2,
    accumulate: int = 2,
    micro_batch: int = 8,
    evaluate_every: int = 4,
    stall_timeout_s: float = 60.0,
    run_timeout_s: float = 60.0,
) -> Run:
    """Return the description of a short run, as its workers receive it."""
    return Run(
        target=target,
        workers=workers,
        global_batch=micro_batch * workers * accumulate,
        micro_batch=micro_batch,
        accumulate=accumulate,
        steps=12,
        dataset_size=256,
        seed=0,
        threads=1,
        evaluate_every=evaluate_every,
        stall_timeout_s=stall_timeout_s,
        run_timeout_s=run_timeout_s,
        beats=str(beats or ""),
    )


def made(workers: int, batch: int, *, step_s: float = 0.25, **changes: Any) -> Record:
    """Return a completed run: a slow warm-up, then `STEPS` steps of `step_s`."""
    record = Record(
        workers=workers,
        batch=batch,
        repeat=0,
        status="done",
        reason="",
        steps=WARM_UP_STEPS + STEPS,
        global_batch=batch,
        micro_batch=batch // workers,
        accumulate=1,
        wall_s=10.0,
        busy=0.0,
        seconds=[1.0] * WARM_UP_STEPS + [step_s] * STEPS,
        sync_s=[0.0] * (WARM_UP_STEPS + STEPS),
        losses=[1.0] * (WARM_UP_STEPS + STEPS),
        accuracy=[(0, 0.125), (8, 0.5), (WARM_UP_STEPS + STEPS, 0.75)],
        cpu_share=[1.0] * workers,
        peak_rss_bytes=[2**28] * workers,
        bytes_on_wire=64,
    )
    return replace(record, **changes)


def ended(workers: int, batch: int, status: str = "failed", reason: str = "boom") -> Record:
    names = ("seconds", "sync_s", "losses", "accuracy", "cpu_share", "peak_rss_bytes")
    nothing: dict[str, Any] = {name: [] for name in names}
    return made(workers, batch, status=status, reason=reason, **nothing)


def with_stall(record: Record, step: int, seconds: float) -> Record:
    """Return the run with one step that took `seconds`."""
    return replace(record, seconds=[*record.seconds[:step], seconds, *record.seconds[step + 1 :]])


def analysed(records: Sequence[Record], *, cores: int = 4, **changes: Any) -> Analysis:
    """Analyse with default settings, which few tests change."""
    return analyse(records, **{"fixed": "global", "threads": 1, "cores": cores, "goal": None, **changes})
