"""Training functions for `verify`: a correct one, and others with one fault each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.cli.verify.probe import VerifyProbe

MICRO_BATCHES = 12
Rng = Callable[[int, int], AbstractContextManager[None]]
Number = Callable[[], float]


def network(*, has_norm: bool = False) -> nn.Sequential:
    """Build a network with dropout and, optionally, a batch norm."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 3))


def keyed(step: int, index: int) -> AbstractContextManager[None]:
    """Return a context that gives each micro-batch its own random numbers."""
    return pe.micro_batch_rng(0, step=step, index=index)


def train(
    verify: VerifyProbe,
    make: Callable[[], nn.Module] = network,
    *,
    accumulator: str = "exact",
    rng: Rng = keyed,
    lr: Number = lambda: 1e-2,
    weight: Number = lambda: 1.0,
) -> None:
    """Train as the documentation says; arguments introduce faults, which may depend on the rank."""
    model = make()
    data = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    sampler = pe.WindowSampler(len(data), seed=0, micro_batch=4, global_batch=4 * MICRO_BATCHES)
    sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator=accumulator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr())
    factor = weight()
    verify.watch(model, optimizer=optimizer, sync=sync)
    for step, window in enumerate(sync.windows(sampler)):
        for index, rows in enumerate(window, start=sampler.first):
            with rng(step, index):
                loss = (model(data[rows]) - data[rows][:, :3]).square().sum()
                sync.backward(factor * loss, count=len(rows))
        sync.clip_grad_norm_(0.5)
        sync.step(optimizer)


def _surprise() -> float:
    return 1 + int.from_bytes(os.urandom(4), "little") / 2**32


def _unseeded_network() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(_surprise())
    return model


def _rng_of_rank(step: int, index: int) -> AbstractContextManager[None]:
    return pe.micro_batch_rng(dist.get_rank(), step=step, index=index)


with_norm = partial(network, has_norm=True)
right = train
plain_sums = partial(train, accumulator="fp32")
dropout_by_rank = partial(train, rng=_rng_of_rank)
batch_norm = partial(train, make=with_norm)
optimizer_by_rank = partial(train, lr=lambda: 1e-2 * (1 + dist.get_rank()))
optimizer_by_world = partial(train, lr=lambda: 1e-2 * dist.get_world_size())
divided_by_world = partial(train, weight=lambda: 1 / dist.get_world_size())
unseeded = partial(train, make=_unseeded_network)
nondeterministic = partial(train, rng=lambda *_: nullcontext(), weight=_surprise)


def own_data(verify: VerifyProbe) -> None:
    model = network()
    sync = pe.GradSync(model, accumulate=4, accumulator="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    verify.watch(model, optimizer=optimizer, sync=sync)
    for window in sync.windows(_forever(torch.ones(4, 8))):
        for x in window:
            sync.backward(model(x).square().sum(), count=4)
        sync.step(optimizer)


def plain_ddp(verify: VerifyProbe) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    verify.watch(model, optimizer=optimizer)
    share = 48 // dist.get_world_size()
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)).split(share)[dist.get_rank()]
    model.eval()
    for x in _forever(data):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def watches_nothing(verify: VerifyProbe) -> None:
    pass


def steps_never(verify: VerifyProbe) -> None:
    model = network()
    verify.watch(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


def raises(verify: VerifyProbe) -> None:
    raise ValueError("boom")


def _forever(data: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        yield data
