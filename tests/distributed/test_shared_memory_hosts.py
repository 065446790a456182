"""Ranks of several hosts: the ranks of a host share memory; a rank that is alone on a host does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import me, recorded_warnings, rings_only
from ranks import on_ranks
from shared_memory_cases import trained
from torch import nn

import pyengine as pe
from pyengine.comm.arena import MemoryOffer


@contextmanager
def _hosts(what: str, num_hosts: int = 2) -> Iterator[list[str]]:
    """Let ranks report that they are on several hosts; yield the warnings."""
    rank, _ = me()
    make = MemoryOffer.make

    def elsewhere(world: int) -> Any:
        offer = make(world)
        if what == "threads":
            return replace(offer, process=replace(offer.process, pid=1))
        if what == "network":
            return replace(offer, network=f"net:[{rank % num_hosts}]")
        return replace(offer, process=replace(offer.process, space=f"host {rank % num_hosts}"))

    with mock.patch.object(MemoryOffer, "make", elsewhere), recorded_warnings(RuntimeWarning) as texts:
        yield texts


@pytest.mark.parametrize(
    ("what", "why"), [("processes", "each is on a different host"), ("threads", "threads of one process")]
)
@on_ranks(3)
def test_where_no_ranks_can_share_all_go_through_the_group_and_rank_0_says_why(what, why):
    rank, _ = me()
    with _hosts(what, 3) as texts:
        num, _ = trained("own", torch.float32)
    said = [text for text in texts if "ranks reduce through" in text]
    assert (len(said), num) == (rank == 0, 0) and all(why in text for text in said)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(4)
def test_ranks_of_several_hosts_share_the_memory_of_each(kind):
    """Ranks alternate between two hosts."""
    found = [0, 0]
    with _hosts("network") as texts:
        for dtype in (torch.float32, torch.bfloat16):
            found = [a + b for a, b in zip(found, trained(kind, dtype), strict=True)]
    assert not any("ranks reduce through" in text for text in texts)
    num, in_place = found
    assert num >= 2
    assert in_place == num or kind == "attach"


def _of_unequal_hosts() -> tuple[int, int]:
    with _hosts("processes"):
        return trained("own", torch.float32)


def test_hosts_of_unequal_numbers_of_ranks_share_theirs(ranks):
    (first, _), alone, (third, _) = ranks(3).run(_of_unequal_hosts)
    assert first == third >= 2 and alone == (0, 0)


@on_ranks(4)
def test_only_a_part_of_a_bucket_a_rank_crosses_between_hosts():
    model = nn.Linear(999, 1)
    with _hosts("network"):
        sync = pe.GradSync(model, shared_memory=True)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            with rings_only(), sync.accumulate():
                sync.backward(model(torch.full((1, 999), 1.0 + me()[0])).sum(), count=4)
            sync.unscale_()
    assert torch.equal(model.weight.grad, torch.full((1, 999), 10 / 16))
    assert max(call.args[0].numel() for call in sent.call_args_list) == sync.layout.buckets[0].numel // 2
