"""The names that the code blocks of a page use but do not define."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import pyengine as pe
from pyengine.cli.study.probe import Run, StudyProbe
from pyengine.cli.target import Enough

Names = dict[str, Any]
SEED, MICRO_BATCH, WINDOW = 7, 2, 12


@contextmanager
def loop() -> Iterator[Names]:
    """Yield the names that every training loop uses."""
    torch.manual_seed(SEED)
    model, critic = nn.Linear(4, 3), nn.Linear(3, 1)
    data = TensorDataset(torch.randn(50, 4), torch.randint(3, (50,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    yield {
        "pe": pe,
        "torch": torch,
        "os": os,
        "DataLoader": DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "cross_entropy": cross_entropy,
        "loss_sum": lambda logits, y: cross_entropy(logits, y, reduction="sum"),
        "data": data,
        "model": model,
        "loader": DataLoader(data, batch_size=MICRO_BATCH),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "critic": critic,
        "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1),
    }


@contextmanager
def experts() -> Iterator[Names]:
    """Yield the names of `loop`, but with a model that has experts, and a group for the experts."""
    with loop() as names:
        model = nn.Sequential(nn.Linear(4, 4))
        model.add_module("experts", nn.Sequential(nn.Linear(4, 3)))
        names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
        yield names | {"expert_group": dist.group.WORLD}


class Classifier(nn.Module):
    """Returns logits; if labels are given, a dict with the loss, as Transformers' Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(x)
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


@contextmanager
def loops_before_and_after() -> Iterator[Names]:
    """Yield what loops of other libraries need: full windows of 4, and a loader that differs by rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    environ |= {"ACCELERATE_USE_CPU": "true"}
    with loop() as names, patch.dict(os.environ, environ | {"GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}):
        names |= {"model": Classifier(), "nullcontext": nullcontext, "clip_grad_norm_": clip_grad_norm_}
        rows = [{"x": torch.randn(4), "labels": torch.randint(3, ())} for _ in range(48)]
        pairs = [(row["x"], row["labels"]) for row in rows]
        own = torch.Generator().manual_seed(dist.get_rank())
        batches = [(torch.randn(2, 4, generator=own), torch.randint(3, (2,), generator=own)) for _ in rows]
        batch = iter(batches)
        names |= {
            "rows": rows,
            "train_loader": DataLoader(pairs, batch_size=2),
            "loader": batches[:12],
            "data": pairs[:24],
        }
        names |= {"get_batch": lambda split: next(batch), "max_steps": 3}
        names |= {"rank": dist.get_rank(), "epochs": 2}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["scaler"] = torch.amp.GradScaler("cpu")
        names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.5)
        yield names | {"ddp_model": DistributedDataParallel(names["model"])}
    with suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextmanager
def engine() -> Iterator[Names]:
    """Yield the names of `loop`, an engine, and a function that trains one window with it."""

    def train(sync: pe.Sync, model: nn.Module, loader: DataLoader) -> None:
        for x, y in next(sync.windows(loader)):
            sync.backward(cross_entropy(model(x), y))

    with loop() as names:
        yield names | {
            "sync": pe.GradSync(names["model"], accumulate=4),
            "train": train,
            "rank": dist.get_rank(),
        }


class Tagger(nn.Linear):
    """Returns logits of tokens; if labels are given, an object with the mean loss, as in Transformers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(x)
        return logits if labels is None else SimpleNamespace(loss=cross_entropy(logits.mT, labels))


@contextmanager
def counts() -> Iterator[Names]:
    """Yield an engine for a token model, a loader of token sequences with counts, and loss functions."""
    with loop() as names:
        names["model"] = Tagger(4, 3)
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=0.1)
        labels = torch.randint(3, (24, 5))
        labels[::2, 3:] = -100
        batch = {"x": torch.randn(24, 5, 4), "labels": labels, "prompt_tokens": torch.full((24,), 9)}
        names["loader"] = [
            {name: value[i : i + 3] for name, value in batch.items()} | {"num_prompts": i % 2}
            for i in range(0, 24, 3)
        ]
        names |= {"token_losses": _token_losses, "losses": _losses}
        yield names | {"sync": pe.GradSync(names["model"], accumulate=4)}


def _token_losses(model: nn.Module, batch: Names) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"]
    return cross_entropy(model(batch["x"]).mT, labels, reduction="none"), labels != -100


def _losses(model: nn.Module, batch: Names) -> list[torch.Tensor]:
    per_token, _ = _token_losses(model, batch)
    return [per_token.sum(), per_token[:, 1:].sum(), model(batch["x"]).square().mean()]


@contextmanager
def exact() -> Iterator[Names]:
    """Yield a sampler, its loader, and the path for a checkpoint."""
    with loop() as names:
        sampler = pe.WindowSampler(
            len(names["data"]), seed=SEED, micro_batch=MICRO_BATCH, global_batch=WINDOW
        )
        exact = pe.Exact(micro_batches=sampler.micro_batches)
        loader = DataLoader(names["data"], batch_sampler=sampler)
        names |= {"seed": SEED, "epochs": 2, "sampler": sampler, "exact": exact, "loader": loader}
        yield names | {"rank": dist.get_rank(), "checkpoint": Path.cwd() / "last.pt"}


@contextmanager
def checkpoint() -> Iterator[Names]:
    """Yield a new engine, and the folder of a checkpoint that another engine saved after a window."""
    with loop() as names:
        model, folder = copy.deepcopy(names["model"]), Path.cwd()
        x, y = names["data"][:MICRO_BATCH]
        sync = pe.GradSync(model, accumulate=3, accumulator="exact")
        with sync.accumulate(last=True):
            sync.backward(names["loss_sum"](model(x), y), count=len(y))
        sync.unscale_()
        dcp.save({"model": model.state_dict(), "sync": sync}, checkpoint_id=folder)
        sync.close()
        new = pe.GradSync(names["model"], accumulate=3, accumulator="exact")
        yield names | {"sync": new, "folder": folder}


@contextmanager
def study() -> Iterator[Names]:
    """Yield what a training function for `study` calls, then run the function as `study` does."""
    run = Run(
        target="",
        workers=dist.get_world_size(),
        global_batch=16,
        micro_batch=4,
        accumulate=2,
        steps=12,
        dataset_size=50,
        seed=SEED,
        threads=1,
        evaluate_every=4,
        stall_timeout_s=60.0,
        run_timeout_s=60.0,
        beats=os.devnull,
    )
    with loop() as names:
        x, y = names["data"].tensors
        names |= {
            "make_model": lambda: names["model"],
            "load": lambda size: TensorDataset(x[:size], y[:size]),
            "load_test": lambda: (x, y),
            "accuracy": lambda model, test: (model(test[0]).argmax(1) == test[1]).float().mean(),
        }
        yield names
        probe = StudyProbe(run)
        with suppress(Enough):
            names["train"](probe)
        assert len(probe.trace.losses) == run.steps


@contextmanager
def adapters() -> Iterator[Names]:
    """Yield an accelerator, and two models with their optimizers."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from pyengine.adapters.accelerate import prepare

    with loop() as names, patch.dict(os.environ):  # an FSDP plugin leaves variables set
        names |= {"generator": nn.Linear(4, 3), "critic": nn.Linear(4, 3)}
        names["optimizer_g"] = torch.optim.AdamW(names["generator"].parameters())
        names["optimizer_d"] = torch.optim.AdamW(names["critic"].parameters())
        names |= {"shared": Accelerator(), "prepare": prepare}
        yield names
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Page: (names that its blocks assume, number of ranks). The other pages use `loop` on two ranks.
NAMES = {
    "README.md": (loops_before_and_after, 2),
    "docs/adapters.md": (adapters, 1),
    "docs/counts.md": (counts, 2),
    "docs/mesh.md": (experts, 4),
    "docs/migrate.md": (loops_before_and_after, 2),
    "docs/reproducible.md": (exact, 2),
    "docs/sharded_states.md": (loops_before_and_after, 2),
    "docs/study.md": (study, 2),
    "docs/telemetry.md": (engine, 2),
    "docs/window.md": (checkpoint, 2),
}
