"""The table of faults: which fault, in which phase of a window, with which use of the engine, and its end.

To add a case, add a line to `TABLE`: phases, fault, end, ways; each phase is tried in every way. Unless a
line says otherwise, the fault is on rank 1 of 2 and on rank 0 of 3: `make test` runs one of the two, `make
faults` runs both. A phase is a trap in `fault_scenario.py` (a new phase needs one call of `trap.at` there), a
fault is an entry of `FAULTS` in `fault_trap.py`, and an end is a check in `fault_outcomes.py`. To run some
of the cases: `pytest tests/faults -k "loader and attach"`.

Phases, in the order of a window ("early" and "last" are its two micro-batches; there is one bucket per
parameter):

    open            the loop begins: `iter(loader)`, or the first statement in `sync.accumulate()`
    loader          `next(loader)`
    loader ahead    `next(loader)` for the next window, which is read before this one's last micro-batch
    early forward   last forward
    early backward  last backward: before any gradient is ready
    early hook      last hook: in a parameter's tensor hook, when the other parameters' gradients are ready
    early bucket    last bucket: in the backward, when all buckets but one are complete and, in the last
                    backward, have been sent (not in DDP's first window, which has one bucket)
    flush           before `sync.flush()` in a window that is ended early; "flushed" is after it
    clip            before `sync.clip_grad_norm_`; "clipped" is after it
    step            inside `sync.step`, before `optimizer.step`
    optimizer       inside `optimizer.step`, before any change; "stepped" is after all changes
    callback        in a function given to `sync.on_step`
    scheduler       in `scheduler.step`

Faults; the part after a comma says what the rank does next, if it does not simply continue with its data:

    exception       the user's code raises, catches the exception around the loop, and continues
    interrupt       KeyboardInterrupt, caught in the same way, as in a notebook
    uncaught        an exception that ends the rank's program; its process group is destroyed
    sys.exit, os._exit, kill (SIGKILL)
    stop            SIGSTOP, until every other rank has ended; then SIGCONT
    pause           SIGSTOP and SIGCONT well within the group's timeout
    late            SIGSTOP and SIGCONT, long after the others have warned that they wait

Ends, see `fault_outcomes.py`:

    replaced        no other rank notices: the rank's next window takes the place of the failed one
    voided          every other rank skips the window and reports who gave it up, and why; all continue
    used            the window is stepped once on every rank, and all continue
    unnoticed       as if nothing had happened
    reported        the same, but another rank has warned once who is stopped, where, and who waits
    raises          every surviving rank gets an error, and none has stepped the window
    used, raises    every other rank has stepped the window once; in the next one all get an error
    used or raises  either of the two: what was done twice takes effect once, or all get an error
    breaks          every surviving rank gets an error; a rank that ends while its last collective runs leaves
                    the others in doubt, so that some may have stepped the window and others not
    parted          like "used, raises", and the error says that ranks are not at the same place
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

ACCUMULATE = 2
LOOPS = (2, 3)  # windows of each loop over a loader
PAUSE_S = 0.2
STALL_AFTER_S, LATE_S = 0.3, 1.0
# Phases before which a bucket has been sent.
BEHIND_A_BUCKET = ("last bucket", "last hook")

DEADLY = ("sys.exit", "os._exit", "kill")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        phase, fault, end: as above.
        way: how the engine is used: "hook", "attach" or "GradSync", and options: "accumulate" for the loop
            that is not nested, "view" for DDP's gradient_as_bucket_view, "exact", "bf16".
        rank, world: the rank that has the fault, and the number of ranks.
        window: the window of the fault. Windows from 2 on belong to the second loop.
        is_slow: whether `make test` leaves the case out. `make test-slow` runs those that cost a process,
            `make faults` runs all cases.
        is_rest: whether `make test-slow` also leaves it out, because it runs another case of the same line.
    """

    phase: str
    fault: str
    end: str
    way: str
    rank: int
    world: int
    window: int = 2
    is_slow: bool = False
    is_rest: bool = False

    @property
    def group_s(self) -> float:
        """The group's timeout, reached only if a rank neither continues nor closes its connections."""
        return 3.0 if self.fault == "stop" else 8.0

    @property
    def stall_after_s(self) -> float:
        """The engine's argument: short if other ranks must notice that a rank is missing."""
        return STALL_AFTER_S if self.fault in ("late", "kill") else 30.0

    def has(self, word: str) -> bool:
        return word in self.way.split()

    def __str__(self) -> str:
        where = "" if self.window == 2 else f", window {self.window}"
        return f"{self.phase}: {self.fault}, {self.way}, rank {self.rank} of {self.world}{where}"


# Ends in a few words, for the campaign's table.
IN_WORDS = {
    "replaced": "no other rank was affected",
    "voided": "every other rank skipped the window and named the rank that gave it up",
    "used": "one step on every rank",
    "unnoticed": "no effect",
    "reported": "one warning named the late rank and its position; no other effect",
    "raises": "an error on every surviving rank; no rank stepped the window",
    "used, raises": "one step on every other rank, then an error on every surviving rank",
    "used or raises": "one step on every rank, or an error on every rank",
    "breaks": "an error on every surviving rank",
    "parted": "an error on every rank: ranks are not at the same place",
}

# Ways to use the engine. Narrow sums are exact on two ranks if every window is full.
GRADSYNC = ("GradSync", "GradSync accumulate")
ATTACH = ("attach", "attach accumulate")
ENGINES = (*GRADSYNC, *ATTACH)
HOOK = ("hook",)
ALL = (*ENGINES, *HOOK)
SPECIAL = ("attach view", "GradSync exact", "attach exact")
NARROW = ("GradSync bf16 accumulate", "attach bf16 accumulate")
NESTED = ("GradSync", "attach", *SPECIAL)  # loops over `sync.windows`


def _line(
    phases: str,
    fault: str,
    end: str,
    ways: tuple[str, ...],
    *,
    at: str = "1/2 0/3",
    window: int = 2,
    quick: bool = True,
) -> Iterator[Case]:
    """Yield the cases of a line: one per phase, way and place.

    `make test` runs every fourth way, beginning with a different one in each phase, at alternating places.

    Args:
        phases: separated by bars.
        fault, end, ways, window: of the cases.
        at: places, as rank/world.
        quick: whether `make test` runs some cases of the line; `make faults` runs all.
    """
    places = [tuple(map(int, place.split("/"))) for place in at.split()]
    step = min(4, len(ways))
    for phase, (number, way) in product(phases.split(" | "), enumerate(ways)):
        start = len(phase + fault)  # any number that varies with the phase
        for other, (rank, world) in enumerate(places):
            is_other = other != number % len(places) or (quick and number % step != start % step)
            is_slow, is_rest = not quick or is_other, is_other or (not quick and number % 3 != 0)
            yield Case(phase, fault, end, way, rank, world, window, is_slow=is_slow, is_rest=is_rest)


TABLE = [
    # Before the window is sent, a fault affects only its own rank.
    *_line("open", "exception", "replaced", ENGINES),
    *_line(
        "loader | early forward | last forward | early backward | early hook",
        "exception", "replaced", ALL,
    ),
    *_line("loader | last forward | early hook", "interrupt", "replaced", ALL, quick=False),
    *_line("loader ahead | flush", "exception", "replaced", NESTED),
    *_line("early bucket", "exception", "replaced", (*ALL, *SPECIAL)),
    *_line("early bucket", "exception", "replaced", NARROW, at="0/2 1/2"),
    *_line("early bucket", "exception", "replaced", ENGINES, window=0),
    *_line("flush", "exception, abandon", "replaced", ENGINES),
    # While the window is being sent: no rank may wait for it, and no rank may use it.
    *_line("last backward | last bucket", "exception", "voided", (*ENGINES, *SPECIAL)),
    *_line("last backward | last bucket", "exception", "voided", ENGINES, window=0),
    *_line("last hook", "exception", "voided", ENGINES),
    *_line("last bucket", "exception", "voided", NARROW, at="0/2 1/2"),
    *_line("last bucket", "interrupt", "voided", ENGINES),
    # Plain DDP cannot continue, and says so if a gradient was ready. (If none was, DDP reduces once too often
    # afterwards.)
    *_line("last hook", "exception", "raises", HOOK, quick=False),
    *_line("last bucket", "exception", "raises", HOOK),
    # After the window was sent: it must be stepped, or all ranks must learn that this rank has not done so.
    *_line("flushed", "exception", "breaks", ENGINES, quick=False),
    *_line("flushed | clip", "exception, step again", "used", ENGINES),
    *_line("clip", "exception", "used, raises", ENGINES),
    *_line("clip", "exception, abandon", "parted", ENGINES),
    *_line("clipped", "exception", "used, raises", ENGINES, quick=False),
    *_line("clipped", "exception, step again", "used", ENGINES, quick=False),
    *_line("clipped", "exception, abandon", "parted", ENGINES, quick=False),
    # In the optimizer, no other rank knows what has changed: stepping again may do the same twice.
    *_line("step | optimizer | stepped", "exception", "used, raises", ENGINES),
    *_line("step | optimizer", "exception, step again", "used or raises", ENGINES),
    *_line("step", "exception, abandon", "parted", ENGINES, quick=False),
    *_line("optimizer | stepped", "exception, abandon", "parted", ENGINES),
    *_line("stepped", "exception, step again", "used, raises", ENGINES),
    # After the optimizer, the window has been used.
    *_line("callback", "exception", "used", (*ENGINES, *SPECIAL, *NARROW), at="1/2"),
    *_line("callback", "exception", "used", ENGINES, at="0/3", quick=False),
    *_line("callback | scheduler", "exception, step again", "used or raises", ENGINES),
    *_line("callback", "interrupt", "used", ENGINES),
    *_line("scheduler", "exception", "used", ENGINES),
    *_line("scheduler", "interrupt", "used", ENGINES, quick=False),
    # A rank whose program ends with an exception.
    *_line("loader | last backward | last bucket", "uncaught", "raises", ALL),
    *_line("early backward", "uncaught", "raises", ALL, quick=False),
    *_line("clip", "uncaught", "breaks", ENGINES),
    *_line("clipped", "uncaught", "used, raises", ENGINES, quick=False),
    *_line("callback", "uncaught", "used, raises", ENGINES),
    # A rank that pauses briefly.
    *_line("last forward", "pause", "unnoticed", ALL, quick=False),
    *_line("last bucket", "pause", "unnoticed", ("attach", "GradSync", "hook")),
    # A rank that pauses for long: the others warn.
    *_line("last forward", "late", "reported", ("GradSync", "attach")),
    *_line("loader", "late", "reported", ("attach accumulate",)),
    *_line("last bucket", "late", "reported", ("GradSync", "attach"), at="2/4", quick=False),
    *_line("step", "late", "reported", ("GradSync accumulate",)),
    *_line(
        "early forward | loader | early backward | last backward | clip | step | stepped | callback",
        "late", "reported", ENGINES, quick=False,
    ),
    *_line("last hook | last bucket", "late", "reported", (*ENGINES, *SPECIAL), quick=False),
    *_line("flush", "late", "reported", NESTED, quick=False),
    # A rank that hangs: the others wait for the group's timeout, which takes seconds per case.
    *_line("last bucket", "stop", "raises", ("attach",), at="1/2"),
    *_line("early backward", "stop", "raises", ("hook",), at="1/2", quick=False),
    *_line("loader | last backward", "stop", "raises", ALL, at="1/2", quick=False),
    *_line("early backward", "stop", "raises", ENGINES, at="0/3", quick=False),
    *_line("last bucket", "stop", "raises", ("GradSync", *HOOK), at="0/3", quick=False),
    *_line("clip", "stop", "breaks", ENGINES, at="1/2", quick=False),
    *_line("clipped", "stop", "used, raises", ENGINES, at="0/3", quick=False),
    *_line("scheduler", "stop", "used, raises", ALL, at="1/2", quick=False),
    # A rank that dies: each case costs a process, which takes seconds to start again.
    *_line("last bucket", "kill", "raises", ("GradSync", "attach", "hook")),
    *_line("last forward", "kill", "raises", ("GradSync", "attach"), at="2/4"),
    *_line("early forward", "kill", "raises", ENGINES, at="1/2 2/4", quick=False),
    *_line("last backward | last bucket", "kill", "raises", ENGINES, at="2/4", quick=False),
    *_line("step", "kill", "used, raises", ENGINES, at="2/4", quick=False),
    *_line("stepped", "kill", "used, raises", ("attach accumulate",), at="1/2"),
    *_line("loader | last backward", "kill", "raises", ALL, at="0/3", quick=False),
    *_line("early backward", "kill", "raises", ALL, at="1/2", quick=False),
    *_line("last bucket", "kill", "raises", (*GRADSYNC[1:], *ATTACH[1:], *SPECIAL), at="1/2", quick=False),
    *_line("clip", "kill", "breaks", ENGINES, at="0/3", quick=False),
    *_line("clipped | callback", "kill", "used, raises", ENGINES, at="1/2", quick=False),
    *_line("optimizer", "kill", "used, raises", ALL, at="0/3", quick=False),
    *_line("last bucket", "os._exit", "raises", ALL, at="0/3", quick=False),
    *_line("last bucket", "sys.exit", "raises", ALL, at="1/2", quick=False),
    *_line("scheduler", "sys.exit", "used, raises", ALL, at="0/3", quick=False),
]  # fmt: skip


def drawn(num: int, *, seed: int) -> list[Case]:
    """Return cases of the table at random places and windows; "open" is where a loop begins."""
    generator = random.Random(seed)
    cases = []
    for _ in range(num):
        case = generator.choice(TABLE)
        world = 2 if case.has("bf16") else generator.choice((2, 3))
        window = generator.choice((0, LOOPS[0]) if case.phase == "open" else (0, LOOPS[0], LOOPS[0] + 1))
        cases.append(replace(case, rank=generator.randrange(world), world=world, window=window))
    return cases
