"""Plot gradient norms and the noise scale, and skip a spike: python examples/gradient_norms.py

One of two workers gets a bad batch. `python -m pyengine plan --from .../steps.jsonl` then prints what other
batch sizes would cost. The plot requires matplotlib.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import pyengine as pe

STEPS, BAD_STEP = 120, 80


def train(path: str) -> None:
    """Train, and write a record of each step to `path`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    true, generator = torch.randn(8, 1), torch.Generator().manual_seed(dist.get_rank())
    sync = pe.GradSync(model)
    sync.measure(pe.GradNorms(), pe.NoiseScale(decay=0.95), pe.SpikePolicy(factor=5, window=20))
    sync.on_step(pe.telemetry.JsonLines(path))
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=generator)
        y = x @ true + torch.randn(16, 1, generator=generator)
        if step == BAD_STEP and dist.get_rank() == 1:
            y *= 1000
        with sync.accumulate():
            sync.backward((model(x) - y).square().sum(), count=len(y))
        sync.step(optimizer)


def plot(records: list[dict], path: Path) -> None:
    """Plot the gradient norms and the noise scale."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    norms, noise = figure.subplots(2, sharex=True)
    for name in records[0]["grad_norms"]:
        norms.semilogy([record["grad_norms"][name] for record in records], label=name)
    norms.legend(title="gradient norm")
    known = [record for record in records if record["noise_scale"] and record["noise_scale"]["spread"]]
    scales, spreads = ([record["noise_scale"][key] for record in known] for key in ("scale", "spread"))
    noise.errorbar([record["step"] for record in known], scales, spreads, errorevery=5)
    noise.set(xlabel="step", ylabel="noise scale (samples)", yscale="log")
    figure.savefig(path)


if __name__ == "__main__":
    path = Path(tempfile.mkdtemp(), "steps.jsonl")
    pe.launch(train, workers=2, args=(str(path),))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    plot(records, path.with_name("norms.png"))
    print(*(record["reason"] for record in records if record["skipped"]), sep="\n")
    print(path.with_name("norms.png"))
