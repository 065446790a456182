"""The plan of a soak test, drawn equally on every rank: models, loops over windows, and troubles in them.

Nothing here communicates with other ranks. A loop has at most one of `TROUBLES`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

SHARDED = ("flat", "nested", "hsdp", "replicate")
EVERYBODY = -1

# Troubles of one rank, while the other ranks go on. If the model is sharded, forwards are collective: then
# all ranks have the trouble together, or for "loader", all ranks learn of it.
ALONE = ("loader", "forward", "early backward", "last backward", "between", "abandon", "callback")
# A window that ends early; one that is not finite; one that all ranks abandon after its reduction; and an
# optimizer that raises on all ranks.
ALWAYS = ("flush", "flush", "bad", "bad", "reduced", "optimizer")
TROUBLES = (*ALWAYS, *ALONE)
EARLY = ("early backward", "between", "abandon")  # not in a window's last micro-batch


class Boom(Exception):
    """An exception that the user's code raises and catches."""


@dataclass(frozen=True)
class Soak:
    """One run.

    Attributes:
        owner: owner of gradients: "own" (GradSync), "ddp", "experts" (DDP with experts), or one of `SHARDED`.
        accumulator, world: accumulator and world size of the engines.
        windows: minimum number of windows.
        seed: seed of everything that is drawn.
    """

    owner: str
    accumulator: str
    world: int
    windows: int
    seed: int = 15

    @property
    def is_sharded(self) -> bool:
        """Whether forwards are collective."""
        return self.owner in SHARDED


@dataclass(frozen=True)
class Made:
    """One model and its engine.

    Attributes:
        shapes: shapes of the units' parameters; the last `num_experts` units are experts.
        policy: the engine's `nonfinite`.
        clear: how gradients are cleared between windows, see `cases.clear`.
        bits: random bits for choices that do not affect the numbers.
    """

    key: str
    soak: Soak
    accumulate: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    num_experts: int
    policy: str
    is_fused: bool
    clear: str
    bits: int

    @property
    def sizes(self) -> list[int]:
        """Return the number of elements of each unit's parameters."""
        return [torch.Size(shape).numel() for shape in self.shapes]


def draw_model(soak: Soak, number: int) -> Made:
    """Return the run's model with this number."""
    key = f"{soak.seed} {soak.owner} {soak.accumulator} {number}"
    random = Random(key)
    least = 1 if soak.is_sharded else 0  # FSDP2 does not support scalars
    shapes = [
        tuple(random.randint(1, 7) for _ in range(random.randint(least, 3)))
        for _ in range(random.randint(2, 4))
    ]
    is_wide = soak.is_sharded and soak.accumulator == "native"  # otherwise sums would be in bfloat16
    return Made(
        key,
        soak,
        accumulate=random.randint(1, 4),
        dtype=torch.float32 if is_wide else random.choice([torch.float32, torch.bfloat16]),
        shapes=tuple(shapes),
        num_experts=1 if soak.owner == "experts" else 0,
        policy=random.choice(["skip", "raise"]),
        is_fused=not soak.is_sharded and random.random() < 0.3,
        clear=random.choice(["engine", "none", "zeros"]),
        bits=random.getrandbits(32),
    )


@dataclass(frozen=True)
class Item:
    """One micro-batch.

    Attributes:
        x: values -1, 0 and 1, `[items, elements of one parameter of every unit]`.
        count: count of the loss, which may be 0.
        uses: whether each unit uses its second parameter.
    """

    x: Tensor
    count: int
    uses: tuple[bool, ...]


def draw_item(made: Made, key: str, rank: int, index: int) -> Item:
    """Return a rank's micro-batch of a loop."""
    seed = zlib.crc32(f"{key} {rank} {index}".encode())
    random = Random(seed)
    shape = (random.randint(1, 5), sum(made.sizes))
    x = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()
    count = 0 if random.random() < 0.05 else random.choice([shape[0], random.randint(1, 9)])
    return Item(x, count, tuple(random.random() < 0.4 for _ in made.shapes))


@dataclass(frozen=True)
class Loop:
    """One loop over windows.

    Attributes:
        numbers: number of micro-batches in each rank's loader.
        takes: number of micro-batches in each window, by window and rank.
        is_nested: whether the loop uses `sync.windows`, and not `with sync.accumulate()`.
        trouble: what goes wrong; empty if nothing does.
        window, rank, at: window, rank (or `EVERYBODY`) and micro-batch of the trouble.
        until: micro-batches after which each rank ends a window early.
        unit: unit of the model in which code fails, or a value is not finite.
        error: type of the exception that the user's code raises.
    """

    key: str
    made: Made
    numbers: tuple[int, ...]
    takes: tuple[tuple[int, ...], ...]
    is_nested: bool
    trouble: str = ""
    window: int = -1
    rank: int = EVERYBODY
    at: int = -1
    until: tuple[int, ...] = ()
    unit: int = 0
    error: type[BaseException] = Boom
    _drawn: dict[tuple[int, int], Item] = field(default_factory=dict, repr=False)

    def start(self, window: int, rank: int) -> int:
        """Return the index of a rank's first micro-batch in a window."""
        return sum(taken[rank] for taken in self.takes[:window])

    def items(self, window: int, rank: int) -> list[Item]:
        start = self.start(window, rank)
        return [self.item(rank, start + k) for k in range(self.takes[window][rank])]

    def forget(self) -> None:
        self._drawn.clear()

    def item(self, rank: int, index: int) -> Item:
        """Return one of a rank's micro-batches, which is drawn only once."""
        if (rank, index) not in self._drawn:
            self._drawn[rank, index] = draw_item(self.made, self.key, rank, index)
        return self._drawn[rank, index]

    def style(self, window: int, k: int, rank: int) -> str:
        """Return how a micro-batch runs its backwards; the same on all ranks if the model is sharded."""
        if self.trouble not in ("", "flush"):
            return "backward"
        is_sharded = self.made.soak.is_sharded
        styles = ["backward", "backward", "block", "two", "two, marked"]
        styles += [] if is_sharded else ["silent"]
        return Random(f"{self.key} {window} {k} {0 if is_sharded else rank}").choice(styles)

    def end(self, window: int) -> str:
        """Return how a reduced window is used, which is the same on all ranks."""
        if self.trouble == "reduced" and window == self.window:
            return "clip, abandon"  # clips first: an empty window is sent only when it is used
        return Random(f"{self.key} {window}").choice(["step", "clip", "unscale", "clip, unscale"])

    def is_bad(self, window: int, rank: int, k: int) -> bool:
        """Whether a micro-batch is not finite."""
        return self.trouble == "bad" and (self.window, self.rank, self.at) == (window, rank, k)

    @property
    def is_voided(self) -> bool:
        """Whether a rank fails while the window is sent, so that all ranks find out at its reduction."""
        return self.trouble == "last backward"

    @property
    def is_everybodys(self) -> bool:
        """Whether the trouble ends the loop on all ranks."""
        return self.is_raised or self.rank == EVERYBODY or self.made.soak.is_sharded

    @property
    def is_raised(self) -> bool:
        """Whether the policy makes all ranks raise."""
        return (
            self.made.policy == "raise"
            and (self.trouble == "bad" or self.is_voided)
            and sum(item.count for r in range(self.made.soak.world) for item in self.items(self.window, r))
            > 0
        )


def draw_loop(made: Made, number: int) -> Loop:
    """Return the model's loop with this number."""
    key = f"{made.key} {number}"
    random = Random(key)
    soak = made.soak
    is_nested = random.random() < 0.7
    trouble = ""
    if random.random() < 0.6:
        trouble = random.choice(TROUBLES)
    until: tuple[int, ...] = ()
    early = random.randint(0, 1)
    if trouble == "flush":
        ends = [random.randint(1, made.accumulate) for _ in range(soak.world)]
        until = tuple(ends[:1] * soak.world if soak.is_sharded else ends)
    if is_nested:
        numbers = [random.randint(int(soak.is_sharded), 3 * made.accumulate) for _ in range(soak.world)]
        numbers[random.randrange(soak.world)] = random.randint(1, 3 * made.accumulate)
        takes = _cut(numbers, made.accumulate, early if until else -1, until)
    else:
        takes = _taken(soak, made.accumulate, random)
        numbers = [sum(taken) for taken in zip(*takes, strict=True)]
    loop = Loop(
        key,
        made,
        tuple(numbers),
        tuple(takes),
        is_nested,
        unit=random.randrange(len(made.shapes)),
        error=random.choice([Boom, Boom, KeyboardInterrupt, MemoryError]),
    )
    return _troubled(loop, trouble, random, early, until)


def _cut(numbers: Sequence[int], accumulate: int, early: int, until: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide loaders into windows; window `early` ends early."""
    left, takes = list(numbers), []
    while any(left):
        most = until if len(takes) == early else [accumulate] * len(left)
        takes.append(tuple(min(n, accumulate, m) for n, m in zip(left, most, strict=True)))
        left = [n - taken for n, taken in zip(left, takes[-1], strict=True)]
    return takes


def _taken(soak: Soak, most: int, random: Random) -> list[tuple[int, ...]]:
    """Draw the numbers of micro-batches per window and rank, for ranks that end their windows themselves."""
    takes = []
    for _ in range(random.randint(1, 3)):
        drawn = [random.randint(1, most) for _ in range(soak.world)]
        takes.append(tuple(drawn[:1] * soak.world if soak.is_sharded else drawn))
    return takes


def _troubled(loop: Loop, trouble: str, random: Random, early: int, until: tuple[int, ...]) -> Loop:
    """Add a trouble at a random position of a loop, if there is a suitable position."""
    soak, takes = loop.made.soak, loop.takes
    is_sharded = soak.is_sharded
    if trouble == "flush":
        return replace(loop, trouble=trouble, window=early, until=until) if loop.is_nested else loop
    if trouble in ("reduced", "optimizer"):
        return replace(loop, trouble=trouble, window=random.randrange(len(takes)))
    if trouble == "loader":
        ranks = [rank for rank, number in enumerate(loop.numbers) if number > int(is_sharded)]
        if not loop.is_nested or not ranks:
            return loop
        rank = random.choice(ranks)
        return replace(
            loop,
            trouble=trouble,
            rank=rank,
            at=random.randrange(int(is_sharded), loop.numbers[rank]),
            error=Boom,
        )
    places = []
    for window, taken in enumerate(takes):
        for rank, number in enumerate(taken):
            length = max(taken) if is_sharded and trouble != "bad" else number
            if trouble == "callback":
                places.append((window, rank, -1))
            elif trouble == "last backward" and length:
                places.append((window, rank, length - 1))
            else:
                places += [(window, rank, k) for k in range(length - (trouble in EARLY))]
    if not trouble or not places:
        return loop
    window, rank, at = random.choice(places)
    is_together = is_sharded and trouble != "bad"
    return replace(loop, trouble=trouble, window=window, rank=EVERYBODY if is_together else rank, at=at)
