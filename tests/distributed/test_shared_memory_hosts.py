"""Ranks of several hosts: each host's share memory, and one that is alone on its own shares none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import me
from shared_memory_cases import trained
from torch import nn

import pyengine as pe
from pyengine.comm.arena import MemoryOffer


@contextmanager
def _hosts(what: str, num_hosts: int = 2) -> Iterator[list[Any]]:
    """Let ranks say that they are on several hosts; give what was said to warn of it."""
    rank, _ = me()
    make = MemoryOffer.make

    def elsewhere(world: int) -> Any:
        offer = make(world)
        if what == "threads":
            return replace(offer, process=replace(offer.process, pid=1))
        if what == "network":
            return replace(offer, network=f"net:[{rank % num_hosts}]")
        return replace(offer, process=replace(offer.process, space=f"host {rank % num_hosts}"))

    MemoryOffer.make = elsewhere
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        MemoryOffer.make = make


def _apart(what: str) -> tuple[list[str], int]:
    with _hosts(what, 3) as caught:
        num, _ = trained("own", torch.float32)
    return [str(each.message) for each in caught if "ranks reduce through" in str(each.message)], num


@pytest.mark.parametrize(
    ("what", "why"), [("processes", "each is on another host"), ("threads", "threads of one process")]
)
def test_where_no_ranks_can_share_all_go_through_the_group_and_rank_0_says_why(ranks, what, why):
    said = ranks(3).run(_apart, what)
    assert [(len(texts), num) for texts, num in said] == [(1, 0), (0, 0), (0, 0)]
    assert why in said[0][0][0]


def _of_two_hosts(kind: str, what: str) -> tuple[list[str], int, int]:
    """Train where ranks are of two hosts, alternately; return what was said, how often the host's ranks
    reduced in memory of theirs, and how often what lies there.
    """
    found = [0, 0]
    with _hosts(what) as caught:
        for dtype, options in ((torch.float32, {}), (torch.bfloat16, {}), (torch.float32, _HIERARCHICAL)):
            found = [a + b for a, b in zip(found, trained(kind, dtype, **options), strict=True)]
    return [str(each.message) for each in caught if "ranks reduce through" in str(each.message)], *found


_HIERARCHICAL = {"wire": pe.wire.Hierarchical(mesh=[[0, 2], [1, 3]])}


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_ranks_of_several_hosts_share_the_memory_of_each(ranks, kind):
    for texts, num, in_place in ranks(4).run(_of_two_hosts, kind, "network"):
        assert texts == [] and num >= 2
        assert in_place == num or kind == "attach"


def _of_unequal_hosts() -> tuple[int, int]:
    with _hosts("processes"):
        return trained("own", torch.float32)


def test_hosts_of_unequal_numbers_of_ranks_share_theirs(ranks):
    (first, _), alone, (third, _) = ranks(3).run(_of_unequal_hosts)
    assert first == third >= 2 and alone == (0, 0)


def _sent_across_hosts() -> tuple[int, int]:
    """Return what this rank sends through the process group across hosts, and of how many elements."""
    model = nn.Linear(999, 1)
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def counted(flat: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(flat.numel())
        return all_reduce(flat, *args, **options)

    with _hosts("network"):
        sync = pe.GradSync(model, shared_memory=True)
        dist.all_reduce = counted
        try:
            with sync.accumulate():
                sync.backward(model(torch.full((1, 999), 1.0 + me()[0])).sum(), count=4)
            sync.unscale_()
        finally:
            dist.all_reduce = all_reduce
        assert torch.equal(model.weight.grad, torch.full((1, 999), 10 / 16))
        return max(sent), sync.layout.buckets[0].numel


def test_only_a_part_of_a_bucket_a_rank_crosses_between_hosts(ranks):
    for largest, numel in ranks(4).run(_sent_across_hosts):
        assert largest == numel // 2
