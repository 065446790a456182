"""Run one script under any launcher, with bitwise equal results: python examples/any_launcher.py

The script also runs unchanged on workers that torchrun has started, on one host or on several hosts
(docs/launch.md lists the commands):

    torchrun --nproc-per-node 2 examples/any_launcher.py
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host0:29500
    examples/any_launcher.py
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

SEED, SAMPLES, MICRO_BATCH, GLOBAL_BATCH = 7, 480, 4, 48


def train() -> str:
    """Return a digest of the trained parameters; rank 0 prints it with the first and last loss."""
    torch.set_num_threads(1)  # rounding depends on the number of threads
    torch.manual_seed(SEED)
    inputs = torch.randn(SAMPLES, 16)
    targets = inputs.square().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = pe.WindowSampler(SAMPLES, seed=SEED, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    exact = pe.Exact(micro_batches=sampler.micro_batches)
    sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator=exact)
    losses: list[float] = []
    sync.on_step(lambda record: losses.append(record.loss))

    for step, window in enumerate(sync.windows(sampler)):
        for rows in window:
            with pe.micro_batch_rng(SEED, step=step, index=sync.place):
                loss = (model(inputs[rows]) - targets[rows]).square().sum()
                sync.backward(loss, count=len(rows))
        sync.clip_grad_norm_(100.0)
        sync.step(optimizer)

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f}, parameters {digest.hexdigest()[:16]}")
    return digest.hexdigest()


if __name__ == "__main__":
    digests = pe.launch(train, workers=2)  # torchrun's options override `workers`
    assert len(set(digests)) == 1
