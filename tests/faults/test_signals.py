"""Commands receive SIGINT or SIGTERM at random moments, including their first seconds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from campaign import record
from stops import BOTH, COMMANDS, problem, stop

TRIES = 100


@pytest.mark.exhaustive
def test_a_signal_at_a_random_moment_ends_every_command_cleanly(tmp_path):
    generator, problems, codes = random.Random(15), [], Counter()
    for index in range(TRIES):
        command = list(COMMANDS)[index % len(COMMANDS)]
        number, is_group = generator.choice(BOTH), generator.random() < 0.5
        seconds = generator.choice([0.1, 1.0, 3.0, 8.0]) * generator.random()
        folder = tmp_path / str(index)
        folder.mkdir()
        found = stop(COMMANDS[command], number, seconds, folder, is_group=is_group)
        codes[found.code] += 1
        if said := problem(found, number):
            problems.append(f"{command}, {number.name}, {seconds:.3f} s, group {is_group}: {said}")
    assert problems == []
    record(
        fault="SIGINT or SIGTERM sent to a command, also during its first seconds",
        made_by=f"to one process or to all, 0 to 8 s behind its first line; {', '.join(COMMANDS)}",
        tries=TRIES,
        outcome=f"one line, no traceback, no process left; exit codes {dict(codes)}",
    )
