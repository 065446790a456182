"""What ranks must agree on, as numbers, which are equal if and only if the digests are equal."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pyengine.window.digest import NUM_PIECES, PIECE_BITS, HeaderDigest, OptimizerStep, Use, difference


def _digest(**changes: object) -> HeaderDigest:
    step = OptimizerStep("SGD", ((0, 1),), (("lr", changes.pop("lr", 0.1)),))
    use = Use(
        [step] * changes.pop("steps", 1), [torch.tensor(changes.pop("factor", 0.5), dtype=torch.float64)]
    )
    said = {"stage": "sends", "engine": "one", "scaler": "", "scale": torch.tensor(8.0), "use": use}
    return HeaderDigest(**{**said, **changes})


def _number(digest: HeaderDigest, *, far: bool) -> list[float]:
    """Return the pieces as a header holds them; with `far`, scalars are treated as on an accelerator."""
    with mock.patch("pyengine.window.digest._is_on_device", lambda _: far):
        lanes = torch.tensor([[piece, piece**2] for piece in digest.pieces()], dtype=torch.float64).flatten()
        digest.add_to(lanes)
    pieces = lanes[::2]
    assert torch.equal(lanes[1::2], pieces * pieces)
    return pieces.tolist()


CHANGES = [
    {"stage": "ends"},
    {"engine": "other"},
    {"scaler": "growth_factor=2.0"},
    {"scale": None},
    {"scale": torch.tensor(8.000001)},
    {"lr": 0.1 + 1e-9},
    {"steps": 2},
    {"factor": 0.50001},
    {"factor": float("inf")},
    {"factor": float("nan")},
]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_digests_have_the_same_number_if_and_only_if_they_are_alike(change, far):
    assert _number(_digest(**change), far=far) == _number(_digest(**change), far=far)
    assert _number(_digest(**change), far=far) != _number(_digest(), far=far)


@pytest.mark.parametrize("far", [False, True])
def test_pieces_are_whole_numbers_whose_squares_a_header_can_sum(far):
    pieces = _number(_digest(), far=far)
    assert len(pieces) == NUM_PIECES
    assert all(piece == int(piece) and 0 <= piece < 2**PIECE_BITS for piece in pieces)


@pytest.mark.parametrize("index", range(NUM_PIECES))
def test_what_is_on_an_accelerator_leaves_a_difference_in_any_piece(index):
    one, other = torch.zeros(2, 2 * NUM_PIECES, dtype=torch.float64)
    other[2 * index] = 1
    with mock.patch("pyengine.window.digest._is_on_device", lambda _: True):
        _digest().add_to(one)
        _digest().add_to(other)
    assert not torch.equal(one, other)


def test_a_difference_names_the_claims_of_each_rank():
    text = difference([_digest().describe(), _digest(lr=0.2).describe()])
    assert text.startswith(
        "ranks have used the last window differently: rank 0: SGD(lr=0.1) of 2 parameters (number 0, 1), "
        "factors 0.5; rank 1: SGD(lr=0.2)"
    )
