"""Workers die at random moments under torch.distributed.elastic, which does not change the run's result.

With exact sums, the number of workers changes between jobs, and the result has the bits of an undisturbed run
on one worker. Without exact sums, it has the bits of an undisturbed run on the same number of workers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from campaign import record
from kill_job import USED_UP
from kill_orders import ONCE, PHASES, draw
from kill_scenario import KillTrap, Plan, train
from marks import rest
from processes import left, living

JOB = Path(__file__).with_name("kill_job.py")
WINDOWS_A_KILL = 4  # most windows until an order kills its worker, unless the machine is very busy
LIMIT_S = 600


@dataclass
class Campaign:
    """Runs with one accumulator, and counts of the workers that were killed in them."""

    ranks: Callable[[int], Any]
    folder: Path
    accumulator: str
    seed: int

    def __post_init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.kills = 0
        self._generator = random.Random(self.seed)
        self._phases = self._endless()
        self._undisturbed: dict[int, list[str]] = {}
        self._runs = self._jobs = 0

    def run(self, jobs: Sequence[tuple[int, int]]) -> None:
        """Run jobs, each (workers, kills), and check the result; every job but the last ends by a kill."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir(parents=True)
        windows = WINDOWS_A_KILL * sum(kills for _, kills in jobs) + 8
        for number, (world, kills) in enumerate(jobs):
            is_last = number == len(jobs) - 1
            phases = [next(self._phases) for _ in range(kills)]
            if number == 0 and phases[0] in ("load", "remove"):
                phases[0] = ""  # there is no checkpoint yet
            orders = [asdict(order) for order in draw(self._generator, phases, world)]
            restarts = kills if is_last else kills - 1
            code = self._job(folder, world, windows, orders, restarts)
            if code == 0:
                break
            assert (code, is_last) == (USED_UP, False), (folder / "errors.txt").read_text()[-4000:]
            self.kills += kills
        assert code == 0
        self.kills += self._check(folder, windows, 1 if self.accumulator == "exact" else jobs[0][0])
        passed = Plan(folder, windows, self.accumulator).passed
        self.passed.update(passed.read_text().splitlines() if passed.exists() else [])

    def _check(self, folder: Path, windows: int, world: int) -> int:
        """Check the digest of every step, and that no saved step is lost; return the last job's restarts."""
        wanted = self._alone(world, windows)
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        saved = 0
        for line in lines:
            if line["what"] == "stepped":
                assert line["digest"] == wanted[line["step"] - 1], line
            elif line["what"] == "saved":
                saved = line["step"]
            else:
                assert line["step"] >= saved, line
        assert json.loads((folder / "end.json").read_text()) == [wanted[windows - 1]]
        return [line["attempt"] for line in lines if line["what"] == "resumed"][-1]

    def _alone(self, world: int, windows: int) -> list[str]:
        if len(self._undisturbed.get(world, [])) < windows:
            folder = self.folder / f"undisturbed-{world}-{windows}"
            folder.mkdir()
            plan = Plan(folder, windows, self.accumulator)
            self.ranks(world).run(train, plan, KillTrap(None, plan.passed), 0)
            lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
            self._undisturbed[world] = [line["digest"] for line in lines if line["what"] == "stepped"]
        return self._undisturbed[world]

    def _job(self, folder: Path, world: int, windows: int, orders: list[dict], max_restarts: int) -> int:
        self._jobs += 1
        file = folder / f"job-{self._jobs}.json"
        job = {"folder": str(folder), "world": world, "windows": windows, "accumulator": self.accumulator}
        file.write_text(json.dumps(job | {"orders": orders, "max_restarts": max_restarts}))
        with (folder / "errors.txt").open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, str(JOB), str(file)],
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            code = process.wait(LIMIT_S)
        assert left(living, str(process.pid)) == []
        return code

    def _endless(self) -> Iterator[str]:
        """Yield all phases in random order, each followed by "" for a random moment; repeat forever."""
        while True:
            for phase in self._generator.sample(PHASES, len(PHASES)):
                yield phase
                yield ""


def _told(campaign: Campaign) -> str:
    where = ", ".join(f"{phase} {campaign.passed[phase]}" for phase in PHASES)
    moments = campaign.kills - campaign.passed.total()
    return f"{campaign.passed.total()} on passing a place ({where}) and {moments} at random moments"


@pytest.mark.slow
@pytest.mark.parametrize(("accumulator", "jobs"), [("exact", [(3, 2), (2, 1)]), *rest(("fp32", [(2, 3)]))])
def test_workers_are_killed_again_and_again_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    ranks, tmp_path, accumulator, jobs
):
    campaign = Campaign(ranks, tmp_path, accumulator, seed=random.randrange(10**6))
    campaign.run(jobs)
    assert campaign.kills, "nobody was killed"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("accumulator", "runs"),
    [
        ("exact", [[(3, 9), (2, 8), (4, 9)], [(2, 9), (4, 8), (3, 9)], [(4, 9), (3, 8), (2, 9)]]),
        ("fp32", [[(2, 26)], [(3, 26)], [(4, 26)]]),
        ("native", [[(2, 26)], [(3, 26)]]),
    ],
)
def test_two_hundred_kills_lose_nothing(ranks, tmp_path, accumulator, runs):
    campaign = Campaign(ranks, tmp_path, accumulator, seed=15)
    for jobs in runs:
        campaign.run(jobs)
    wanted = sum(kills for jobs in runs for _, kills in jobs)
    assert campaign.kills >= 0.9 * wanted, _told(campaign)
    assert set(PHASES) - set(ONCE) <= set(campaign.passed), _told(campaign)
    record(
        fault=f"a worker dies (SIGKILL), accumulator {accumulator}",
        made_by=f"torch.distributed.elastic, 2 to 4 workers: {_told(campaign)}",
        tries=campaign.kills,
        outcome="every run ended with the bits of an undisturbed run; no saved step was lost; no process was "
        "left",
    )
