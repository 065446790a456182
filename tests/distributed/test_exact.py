"""accumulator="exact": the same global batch in the same micro-batches gives the same bits for every world size."""

from __future__ import annotations

import hashlib

import pytest
import torch
from cases import me
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

STEPS = 4
KINDS = ("own", "attach")


class Gpt(nn.Module):
    """Embedding, attention and an MLP with dropout: rows of rare tokens are zero, and everything else is not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24, dtype=dtype)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True, dtype=dtype)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 50, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the summed loss of predicting each token's successor."""
        logits = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


def _digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _wrap(kind: str, model: nn.Module, bucket_mb: float, **options: object) -> tuple[pe.Sync, nn.Module]:
    if kind == "own":
        return pe.GradSync(model, bucket_cap_mb=bucket_mb, **options), model
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    return pe.attach(ddp, **options), ddp


def _train(kind: str, micro_batches: int, dtype: torch.dtype, accumulator: str) -> list[str]:
    """Train, and return a digest of parameters, optimizer state and norm after every step."""
    _, world = me()
    torch.manual_seed(0)
    model = Gpt(dtype)
    data = torch.randint(
        0, 50, (2 * micro_batches * STEPS - 5, 9)
    )  # the last window and its last micro-batch are short
    sampler = pe.WindowSampler(len(data), seed=7, micro_batch=2, global_batch=2 * micro_batches)
    sync, forward = _wrap(kind, model, 0.01 * world, accumulate=sampler.accumulate, accumulator=accumulator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests = []
    for step, window in enumerate(sync.windows(sampler)):
        for index, rows in enumerate(window, start=sampler.first):
            with pe.micro_batch_rng(7, step=step, index=index):
                loss = forward(data[rows])
                sync.backward(loss, count=8 * len(rows))
        norm = sync.clip_grad_norm_(1.0)
        assert sync.step(optimizer)
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        digests.append(_digest(*model.parameters(), *state, norm))
    assert len(digests) == STEPS
    return digests


_alone: dict[tuple, list[str]] = {}


def _single(ranks, *case) -> list[str]:
    if case not in _alone:
        _alone[case] = ranks(1).run(_train, "own", *case)[0]
    return _alone[case]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [8, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_world_size_gives_the_same_bits(ranks, kind, world, micro_batches, dtype):
    alone = _single(ranks, micro_batches, dtype, "exact")
    for digests in ranks(world).run(_train, kind, micro_batches, dtype, "exact"):
        assert digests == alone


def test_plain_fp32_sums_do_not(ranks):
    assert ranks(2).run(_train, "own", 12, torch.float32, "fp32")[0] != _single(
        ranks, 12, torch.float32, "fp32"
    )
