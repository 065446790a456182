"""A window whose counts were read ahead goes on from a state: its losses are weighed by the same totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import engine, me
from recipes import RECIPES, Heads, Recipe, micro_batch
from states import content

import pyengine as pe

MICRO_BATCHES, WINDOWS, STOP = 12, 2, 1
States = list[dict[str, Any]]
Bits = list[torch.Tensor]


class Run:
    """Trains windows of twelve micro-batches on any number of ranks.

    Args:
        kind: of engine; exact sums, so that the result does not depend on the number of ranks.
        recipe: what is counted, and the losses.
        first: parameters to start from; None: new ones.
    """

    def __init__(self, kind: str, recipe: Recipe, first: Bits | None = None) -> None:
        _, world = me()
        self.recipe, self.model = recipe, Heads()
        if first is not None:
            for p, value in zip(self.model.parameters(), first, strict=True):
                p.data.copy_(value)
        exact, accumulate = pe.Exact(micro_batches=MICRO_BATCHES), MICRO_BATCHES // world
        self.sync, self.forward = engine(kind, self.model, accumulate=accumulate, accumulator=exact)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.sampler = pe.WindowSampler(
            MICRO_BATCHES * WINDOWS, seed=3, micro_batch=1, global_batch=MICRO_BATCHES
        )

    def train(self, *, start: int = 0, stop: int | None = None, ahead: bool = True) -> None:
        """Train from a window on, to the end or behind `stop` micro-batches of the window STOP."""
        self.sampler.set_epoch(0, window=start, due=self.sync.due)
        loader = [micro_batch(rows[0]) for rows in self.sampler]
        count = self.recipe.count
        for number, window in enumerate(self.sync.windows(loader, count=count if ahead else None), start):
            for done, batch in enumerate(window):
                if number == STOP and done == stop:
                    return
                losses = self.recipe.losses(self.forward, batch)
                self.sync.backward(losses, **({} if ahead else {"count": count(batch)}))
            assert self.sync.step(self.optimizer)

    @property
    def bits(self) -> Bits:
        return [p.detach().clone() for p in self.model.parameters()]


def _whole(kind: str, recipe: str) -> Bits:
    run = Run(kind, RECIPES[recipe])
    run.train()
    return run.bits


def _saved(kind: str, recipe: str, stops: list[int], *, ahead: bool = True) -> tuple[dict[str, Any], Bits]:
    """Stop in the middle of the second window; rank r after `stops[r]` micro-batches."""
    rank, _ = me()
    run = Run(kind, RECIPES[recipe])
    run.train(stop=stops[rank], ahead=ahead)
    # What has been handed out and not been done is what this rank would not come back from.
    run.sync._engine.counter.places = run.sync._engine.counter.places[: stops[rank]]
    return run.sync.state_dict(), run.bits


def _resumed(kind: str, recipe: str, states: States, bits: Bits) -> Bits:
    rank, world = me()
    run = Run(kind, RECIPES[recipe], bits)
    run.sync.load_state_dict(states[rank] if len(states) == world else states)
    run.train(start=STOP)
    return run.bits


@pytest.mark.parametrize(
    ("before", "after", "kind", "recipe"),
    [
        (3, 3, "own", "several heads"),
        (2, 2, "attach", "prompt mean"),
        (4, 2, "own", "prompt mean"),
        (1, 3, "attach", "several heads"),
    ],
)
def test_a_resumed_window_keeps_the_totals_it_began_with(ranks, kind, recipe, before, after):
    # Some ranks have done nothing, so that only others know the totals; DDP's forwards may be collective.
    least = int(kind == "attach")
    saved = ranks(before).run(_saved, kind, recipe, [1, least, 2, least] if before > 1 else [5])
    states, bits = [state for state, _ in saved], saved[0][1]
    whole = ranks(1).run(_whole, kind, recipe)[0]
    for found in ranks(after).run(_resumed, kind, recipe, states, bits):
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def _saved_again(states: States) -> list[dict[str, float]]:
    """Return the totals of a state, of what it was loaded into, and of that behind the window."""
    rank, _ = me()
    run = Run("own", RECIPES["several heads"])
    run.sync.load_state_dict(states[rank])
    again = run.sync.state_dict()
    run.train(start=STOP)
    return [content(state).get("totals", {}) for state in (states[rank], again, run.sync.state_dict())]


def test_a_state_that_was_loaded_and_not_gone_on_with_keeps_its_totals(ranks):
    states = [state for state, _ in ranks(2).run(_saved, "own", "several heads", [1, 2])]
    for saved, again, behind in ranks(2).run(_saved_again, states):
        assert list(saved) == ["ce", "mtp", "aux"]
        assert saved["aux"] == MICRO_BATCHES
        assert (again, behind) == (saved, {})


def _refused(recipe: str, states: States, change: str) -> str:
    rank, _ = me()
    run = Run("own", RECIPES[recipe])
    run.sync.load_state_dict(states[rank])
    with pytest.raises(ValueError, match="count") as caught:
        if change == "another loader":
            loader = [micro_batch(700 + index) for index in range(99)]
            for _ in run.sync.windows(loader, count=run.recipe.count):
                pass
        elif change == "no counts":
            next(run.sync.windows([micro_batch(0)] * 9))
        else:
            run.train(start=STOP)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "recipe", "done", "message"),
    [
        ("another loader", "several heads", [1, 0], "the window that goes on was to count"),
        ("other names", "token mean", [1, 0], "have the totals"),
        ("no counts", "several heads", [1, 2], "loop over sync.windows(loader, count=...)"),
    ],
)
def test_what_is_not_the_window_that_was_saved_is_refused_on_every_rank(ranks, change, recipe, done, message):
    states = [state for state, _ in ranks(2).run(_saved, "own", "several heads", done)]
    first, *others = ranks(2).run(_refused, recipe, states, change)
    assert others == [first]
    assert message in first


def test_a_window_that_was_begun_without_counts_goes_on_with_one(ranks):
    ((state, bits),) = ranks(1).run(_saved, "own", "token mean", [5], ahead=False)
    assert "totals" not in content(state)
    (found,) = ranks(1).run(_resumed, "own", "token mean", [state], bits)
    (whole,) = ranks(1).run(_whole, "own", "token mean")
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    (error,) = ranks(1).run(_refused, "several heads", [state], "names, of which it had none")
    assert "was begun without" in error
