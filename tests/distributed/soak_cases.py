"""A soak test on one rank: windows as drawn by `soak_plan`, each compared with a reference in this process.

In between, the resources of the process are measured.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from cases import Inject, assert_same, clear
from soak_held import Held
from soak_model import BACKWARDS, LEARNING_RATE, Fails, Model, Reference, no_trap
from soak_plan import EVERYBODY, Boom, Item, Loop, Made, Soak, draw_loop, draw_model
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

LOOPS = 10  # number of loops of a short-lived model
USERS = (Boom, KeyboardInterrupt, MemoryError)


class Places:
    """The groups and meshes of a run, created once, because torch never frees them."""

    def __init__(self, soak: Soak) -> None:
        world, rank = soak.world, dist.get_rank()
        self.mesh = self.group = None
        self.sharers = [rank]
        if soak.owner == "hsdp":
            self.mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        elif soak.is_sharded:
            self.mesh = init_device_mesh("cpu", (world,))
        elif soak.owner == "experts":
            parts = [list(range(first, world, 2)) for first in range(min(2, world))]
            groups = [dist.new_group(part) for part in parts]
            self.sharers, self.group = parts[rank % 2], groups[rank % 2]


def _owned(made: Made, model: Model, places: Places) -> tuple[pe.Sync, nn.Module]:
    """Return an engine over a model, and the module to call."""
    soak, random = made.soak, Random(made.bits)
    options: dict[str, Any] = {
        "accumulate": made.accumulate,
        "accumulator": soak.accumulator,
        "nonfinite": made.policy,
        "stall_after_s": random.choice([None, 30.0]),
    }
    cap_mb = random.choice([1e-5, 1e-4, 25])
    if soak.owner == "own":
        return pe.GradSync(model, bucket_cap_mb=cap_mb, **options), model
    if soak.is_sharded:
        narrow = {} if soak.accumulator == "native" else {"reduce_dtype": torch.float32}
        how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**narrow), "mesh": places.mesh}
        wrap = replicate if soak.owner == "replicate" else fully_shard
        for unit in model.units if soak.owner != "flat" else ():
            wrap(unit, **how)
        wrap(model, **how)
        if soak.accumulator != "exact":
            none = {"defer": "none"} if made.dtype == torch.float32 else {}  # narrow sums would be rounded
            options |= random.choice([{}, none, {"defer_budget_mb": float("inf")}])
        return pe.attach(model, **options), model
    if soak.owner == "experts":
        names = [f"experts.{name}" for name, _ in model.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        options["axes"] = pe.Axes(groups={"experts.*": places.group})
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=cap_mb,
        gradient_as_bucket_view=random.random() < 0.5,
        find_unused_parameters=True,
    )
    return pe.attach(ddp, **options), ddp


def _local(whole: Tensor | None, like: Tensor) -> Tensor | None:
    """Return this rank's part of a tensor that is sharded like `like`."""
    if whole is None or not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _here(value: Tensor | None) -> Tensor | None:
    return value.to_local() if isinstance(value, DTensor) else value


class Subject:
    """One model with its engine on this rank, and its reference."""

    def __init__(self, made: Made, places: Places) -> None:
        self.made, self.rank = made, dist.get_rank()
        self._reference = Reference(made, places.sharers)
        self._model = Model(made)
        self.sync, self._forward = _owned(made, self._model, places)
        self._params = dict(self._model.named_parameters())
        self._optimizer = torch.optim.SGD(self._params.values(), lr=LEARNING_RATE, fused=made.is_fused)
        self._optimizer.register_step_pre_hook(lambda *_: self._strike("optimizer", self._next))
        self._records: list[pe.StepRecord] = []
        self.sync.on_step(self._listen)
        self._next, self._is_armed = 0, False

    def run(self, loop: Loop) -> int:
        """Run a loop to its end, in spite of errors; return the number of windows that all ranks passed."""
        self._loop, self._next, self._is_armed = loop, 0, True
        while self._next < len(loop.takes):
            try:
                self._windows() if loop.is_nested else self._accumulate()
            except (*USERS, FloatingPointError, ValueError, RuntimeError) as error:
                self._check_error(error)
                if self._recover():
                    break
        loop.forget()
        return self._next

    def _windows(self) -> None:
        loop = self._loop
        for window in self.sync.windows(self._loader(loop.start(self._next, self.rank))):
            for k, index in enumerate(window):
                self._micro_batch(k, loop.item(self.rank, index))
                if loop.until and (self._next, k + 1) == (loop.window, loop.until[self.rank]):
                    break
            if loop.until and self._next == loop.window:
                self.sync.flush()
            self._end()

    def _loader(self, start: int) -> Iterator[int]:
        for index in range(start, self._loop.numbers[self.rank]):
            if self._loop.trouble == "loader" and (self._loop.rank, self._loop.at) == (self.rank, index):
                self._fail()
            yield index

    def _accumulate(self) -> None:
        loop = self._loop
        while self._next < len(loop.takes):
            number, start = loop.takes[self._next][self.rank], loop.start(self._next, self.rank)
            for k in range(number):
                with self.sync.accumulate(last=k == number - 1):
                    self._micro_batch(k, loop.item(self.rank, start + k))
            self._end()

    def _micro_batch(self, k: int, item: Item) -> None:
        loop, window, x = self._loop, self._next, item.x
        self._model.trap = partial(self._between_units, k)
        if loop.is_bad(window, self.rank, k) and loop.unit:
            x = x.clone()
            x[0, 0] = float("nan")
        try:
            loss = self._forward(x, item.uses)
        finally:
            self._model.trap = no_trap
        BACKWARDS[loop.style(window, k, self.rank)](self.sync, loss, item.count)
        for trouble in ("between", "abandon"):
            self._strike(trouble, window, k)

    def _between_units(self, k: int, index: int, total: Tensor) -> Tensor:
        loop = self._loop
        if index == loop.unit:
            self._strike("forward", self._next, k)
            if loop.trouble.endswith("backward") and self._is_here(loop.trouble, self._next, k):
                self._is_armed = False
                return Fails.apply(total, loop.error)
        if index == 0 == loop.unit and loop.is_bad(self._next, self.rank, k):
            return Inject.apply(total, float("inf"))
        return total

    def _is_here(self, trouble: str, window: int, k: int) -> bool:
        loop = self._loop
        is_mine = loop.rank in (self.rank, EVERYBODY)
        return self._is_armed and is_mine and (trouble, window, k) == (loop.trouble, loop.window, loop.at)

    def _strike(self, trouble: str, window: int, k: int = -1) -> None:
        if self._is_here(trouble, window, k):
            self._fail()

    def _fail(self) -> None:
        if self._is_armed:
            self._is_armed = False
            raise self._loop.error("in the user's code")

    def _listen(self, record: pe.StepRecord) -> None:
        self._records.append(record)
        self._strike("callback", self._next)

    def _check_error(self, error: BaseException) -> None:
        """Check that an error is this rank's own, or the expected error for another rank's failure."""
        loop = self._loop
        if not self._is_armed and type(error) is loop.error:
            return
        heard = ValueError if loop.trouble == "loader" else None
        heard = FloatingPointError if loop.is_raised else heard
        if heard is None or type(error) is not heard:
            raise AssertionError(f"window {self._next} of {loop}") from error

    def _recover(self) -> bool:
        """Do what a user does after an error; return whether the loop is over."""
        loop = self._loop
        if loop.trouble == "callback":
            self._pass(loop.end(self._next))  # the window was used
        if loop.is_everybodys:
            self.sync.abandon()
            return True
        if loop.trouble == "abandon" or not loop.is_nested:
            self.sync.abandon()
        if loop.is_voided:
            self._pass("")
        if self._next == len(loop.takes) and loop.is_nested:
            if loop.is_voided:
                self.sync.abandon()
            self.sync.synchronize()  # the other ranks compare at the end of their loop
        return False

    def _end(self) -> None:
        """Use a window in the way that the loop has drawn."""
        how = self._loop.end(self._next)
        if "clip" in how:
            self.sync.clip_grad_norm_(1e9)
        if "abandon" in how:
            self._is_armed = False
            self.sync.abandon()
            self._next += 1
            return
        items, count, skips = self._right()
        if "unscale" in how:
            self.sync.unscale_()
            if not skips:
                want = self._reference.means(self._reference.sums(items), count)
                self._assert_same({name: param.grad for name, param in self._params.items()}, want)
        stepped = bool(self.sync.step(self._optimizer))
        assert stepped is not skips, (self._loop, self._next, self._records[-1:])
        self._pass(how)

    def _pass(self, how: str) -> None:
        """Step the reference, compare, and go on to the next window."""
        items, count, skips = self._right()
        self._next += 1
        if not skips:
            sums = self._reference.sums(items)
            self._reference.step(sums, count)
        self._assert_same(self._params, self._reference.params)
        if how:
            record = self._records.pop()
            assert (record.count, record.skipped) == (count, skips), record
            assert not self._records
            clear(self._model, self.made.clear)

    def _assert_same(self, got: dict[str, Any], want: dict[str, Tensor | None]) -> None:
        try:
            assert_same(
                {name: _here(value) for name, value in got.items()},
                {name: _local(value, self._params[name]) for name, value in want.items()},
            )
        except AssertionError as error:
            raise AssertionError(f"window {self._next} of {self._loop}") from error

    def _right(self) -> tuple[list[tuple[int, Item]], int, bool]:
        """Return the window's items with their ranks, its count, and whether its step must be skipped."""
        loop, window = self._loop, self._next
        kept, count = [], 0
        for rank in range(self.made.soak.world):
            for k, item in enumerate(loop.items(window, rank)):
                count += item.count
                if loop.style(window, k, rank) != "silent":
                    kept.append((rank, item))
        is_here = window == loop.window
        is_wrong = is_here and (loop.is_voided or loop.trouble == "bad")
        return kept, count, count == 0 or is_wrong


@dataclass(frozen=True)
class Soaked:
    """The result of a run on one rank.

    Attributes:
        windows: number of windows that passed on all ranks.
        held: resources after each quarter of the run, and after the run. Many models are trained in the first
            two quarters, and only one in the last two.
    """

    windows: int
    held: list[Held]


def soak(case: Soak) -> Soaked:
    """Train at least as many windows as the case requires."""
    places, held = Places(case), []
    windows = number = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while windows * 2 < case.windows:
            windows += _short_life(draw_model(case, number), places)
            number += 1
            while windows * 4 >= case.windows * (len(held) + 1) and len(held) < 2:
                held.append(Held.now())
        subject, loops = Subject(draw_model(case, number), places), count()
        for quarter in (3, 4):
            windows += subject.run(draw_loop(subject.made, next(loops)))  # lazy resources now exist
            while windows * 4 < case.windows * quarter:
                windows += subject.run(draw_loop(subject.made, next(loops)))
            held.append(Held.now())
        subject.sync.close()
        del subject
    return Soaked(windows, [*held, Held.now()])


def _short_life(made: Made, places: Places) -> int:
    """Train one model; one in four engines is not closed, but only deleted."""
    subject = Subject(made, places)
    windows = sum(subject.run(draw_loop(made, number)) for number in range(LOOPS))
    if made.bits % 4:
        subject.sync.close()
    else:
        del subject
        gc.collect()  # its callback forms a cycle; until it is collected, no other engine can use its group
    return windows
