"""`Transfers` launches buckets in the order of the layout, with later collectives of a bucket in between."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyengine.comm.base import Done, Local
from pyengine.comm.staged import Staged
from pyengine.gradients.transfers import Transfers

CPU = torch.device("cpu")


class _Bucket:
    """Records each collective as `<bucket><round>`."""

    def __init__(self, name: str, num_rounds: int, launched: list[str]) -> None:
        self._name, self._num_rounds, self._launched = name, num_rounds, launched
        self.device = CPU

    def seal(self) -> None:
        pass

    def send(self, *_: Any, **__: Any) -> Staged:
        def rounds() -> Iterator[Done]:
            for number in range(self._num_rounds):
                self._launched.append(f"{self._name}{number}")
                yield Done(torch.zeros(1))

        return Staged(rounds(), self._num_rounds, CPU)


@pytest.mark.parametrize(
    ("are_alike", "want"),
    [(True, ["a0", "b0", "a1", "c0", "b1", "a2"]), (False, ["a0", "b0", "c0"])],
)
def test_a_later_collective_follows_the_first_one_of_the_next_bucket(are_alike, want):
    """Ranks with different buckets launch every first collective before any second one."""
    launched: list[str] = []
    buckets: Any = [_Bucket(name, 3, launched) for name in "abc"]
    header: Any = SimpleNamespace(is_ready=lambda: True, is_refused=lambda: False)
    divisor: Any = SimpleNamespace(before_wire=lambda: None)
    transfers: Any = Transfers(
        [(bucket, Local()) for bucket in buckets], header, divisor, are_alike=are_alike
    )
    for index in (2, 0, 1):  # complete in any order
        transfers.complete(transfers.all[index])
    assert launched == want
    transfers.launch_rest(poison=False)
    rest = ["c1", "b2", "c2"] if are_alike else ["c1", "b1", "a1", "c2", "b2", "a2"]
    assert launched == want + rest
