"""Capture a window as one CUDA graph if the host is slower than the GPU: python examples/captured_windows.py

A GPU runs eight micro-batches of two rows faster than Python can launch them. A captured window is a single
launch. Without a GPU, the same function trains the same windows without a graph.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pyengine as pe

ACCUMULATE, WINDOWS = 8, 40


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a toy task: which of ten numbers is the largest?"""
    inputs = torch.rand(ACCUMULATE * WINDOWS, 2, 10, generator=torch.Generator().manual_seed(0))
    return [(x, x.argmax(1)) for x in inputs]


def train(device: str) -> list[float]:
    """Train on one device; return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
    has_graph = device != "cpu"
    # The scheduler changes the learning rate, so it is a tensor on the device, from which the graph reads it.
    lr = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=has_graph)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    sync = pe.GradSync(model, accumulate=ACCUMULATE)
    losses: list[float] = []
    sync.on_step(lambda record: losses.append(record.loss))

    def train_window(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for x, y in batches:
            loss = cross_entropy(model(x), y, reduction="sum")
            sync.backward(loss, count=y.numel())
        sync.step(optimizer, scheduler, max_norm=1.0)

    step = sync.capture(train_window) if has_graph else lambda window: train_window(list(window))
    for window in sync.windows(micro_batches()):
        step(window)
    if has_graph:
        print(step)
    return losses


if __name__ == "__main__":
    losses = train("cuda" if torch.cuda.is_available() else "cpu")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
