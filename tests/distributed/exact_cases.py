"""Models with arbitrary values, and their training, whose exact sums do not depend on the world size."""

from __future__ import annotations

import hashlib

import torch
from cases import me
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

STEPS = 2  # a full window, and a short one with buckets that DDP has rebuilt


class Gpt(nn.Module):
    """Embedding, attention and an MLP with dropout: only gradients of unused embedding rows are zero."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24, dtype=dtype)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True, dtype=dtype)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(24, 50, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


class Cnn(nn.Module):
    """A convolution and batch norms with odd sizes; returns a summed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU())
        self.norm, self.head = nn.BatchNorm1d(7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        target = x.float().mean((2, 3)).argmax(1)
        logits = self.head(self.norm(self.stem(x).mean((2, 3))))
        return nn.functional.cross_entropy(logits.float(), target, reduction="sum")


def digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        sha.update(whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def wrap(kind: str, model: nn.Module, bucket_mb: float, **options: object) -> tuple[pe.Sync, nn.Module]:
    if kind == "own":
        return pe.GradSync(model, bucket_cap_mb=bucket_mb, **options), model
    if kind in ("fsdp", "hsdp"):
        _, world = me()
        shape = (world,) if kind == "fsdp" else (2, world // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for layer in [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]:
            fully_shard(layer, mesh=mesh)
        return pe.attach(fully_shard(model, mesh=mesh), **options), model
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    return pe.attach(ddp, **options), ddp


def train_gpt(kind: str, dtype: torch.dtype, micro_batches: int, accumulator: object) -> str:
    """Train, and return a digest of parameters, optimizer state, norms and losses."""
    _, world = me()
    torch.manual_seed(0)
    model = Gpt(dtype)
    data = torch.randint(0, 50, (2 * micro_batches * STEPS - 5, 9))  # the last window is short
    sampler = pe.WindowSampler(len(data), seed=7, micro_batch=2, global_batch=2 * micro_batches)
    sync, forward = wrap(kind, model, 0.01 * world, accumulate=sampler.accumulate, accumulator=accumulator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, losses = [], []
    sync.on_step(lambda record: losses.append(record.loss))
    for step, window in enumerate(sync.windows(sampler)):
        for rows in window:
            with pe.micro_batch_rng(7, step=step, index=sync.place):
                loss = forward(data[rows])
                sync.backward(loss, count=8 * len(rows))
        norms.append(sync.clip_grad_norm_(1.0))
        assert sync.step(optimizer)
    assert len(norms) == STEPS
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return digest(*model.parameters(), *state, *norms, torch.tensor(losses, dtype=torch.float64))
