"""`bench_mean.py`: the DDP loop does not compute the mean of short and unequal windows; the engine does."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_only_the_ddp_loop_is_wrong_in_short_and_unequal_windows():
    done = forked.python(str(BENCHMARKS / "bench_mean.py"), "--model", "gpt-5m", cwd=BENCHMARKS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    ddp, engine = ({case: row[loop] for case, row in found["errors"].items()} for loop in ("ddp", "engine"))
    assert max(ddp["full"], *engine.values()) < 1e-5
    assert ddp["short"] == 0.5 and ddp["tokens"] > 0.05
    sent = found["bytes"]
    assert sent["ddp"] == 8 * sent["no_sync"]
    assert sent["fp32"] == pytest.approx(sent["no_sync"], rel=1e-3)
    assert sent["bf16"] == pytest.approx(sent["fp32"] / 2, rel=1e-3)
